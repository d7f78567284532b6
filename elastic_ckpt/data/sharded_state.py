"""The state of a PyTorch loader by logical shard, for `torch.distributed.checkpoint`.

That library writes an entry of a state under its name, by the first rank that has it,
and each rank reads the entries that it names. Named by logical shards and not by ranks,
the state of any number of ranks can be read by any other, without a collective.

An entry is text: a `checked_json` object of version 1. `position` has everything of
`LocalBatches.get_state` but its cursors. `shard_00017` has `cursor`, and `position`, to
which it belongs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import local_batches, state

_VERSION = 1
_POSITION = "position"


class Rank(Protocol):
    """What has the state of a rank: a `TorchLoader` or `LocalBatches`."""

    def state_dict(self) -> local_batches.StateDict:
        """The state of the rank."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Moves to a state that has all shards of the rank."""
        ...


class ShardedState:
    """The state of a rank's rows by logical shard, which any number of ranks can load.

    It is a `Stateful` of `torch.distributed.checkpoint`, beside those of the weights:

        dcp.save({"model": model, "data": ec.data.ShardedState(loader)}, ...)
        dcp.load({"model": model, "data": ec.data.ShardedState(loader)}, ...)

    Load it before the first batch, when it names the entries of all shards; later it
    names those of this rank alone.

    Args:
      rows: the `TorchLoader`, or `LocalBatches`, of this rank.
    """

    def __init__(self, rows: Rank) -> None:
        self._rows = rows

    def state_dict(self) -> dict[str, str]:
        """The entries of this rank: `position`, and `shard_00017` for each shard."""
        fields: dict[str, Any] = dict(self._rows.state_dict())
        by_shard: dict[str, storage.Json] = fields.pop("cursors")
        for name in ("version", "digest"):
            fields.pop(name, None)
        position = fields["position"]
        if not state.row_of(position):
            # Nothing was read from any shard.
            num_shards = fields["pipeline"].get("num_logical_shards", 0)
            by_shard = {str(shard): None for shard in range(num_shards)} | by_shard
        entries = {_POSITION: _sealed(fields)}
        for shard, cursor in by_shard.items():
            name = f"shard_{int(shard):05d}"
            entries[name] = _sealed({"position": position, "cursor": cursor})
        return entries

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Moves to a state that any number of ranks saved.

        Raises:
          DataError: if an entry is missing, was altered, or is of another step; and as
            `LocalBatches.set_state`.
        """
        if _POSITION not in state_dict:
            raise errors.DataError(
                f"the state has no entry {_POSITION!r}, only {sorted(state_dict)[:5]};"
                " load what a ShardedState saved"
            )
        fields = _unsealed(_POSITION, state_dict[_POSITION])
        by_shard = {}
        for name in sorted(state_dict.keys() - {_POSITION}):
            entry = _unsealed(name, state_dict[name])
            if entry["position"] != fields["position"]:
                raise errors.DataError(
                    f"the entry {name!r} of the data state has position"
                    f" {entry['position']}, and the others {fields['position']}; load"
                    " all entries from one checkpoint"
                )
            by_shard[str(int(name.removeprefix("shard_")))] = entry["cursor"]
        self._rows.load_state_dict(
            local_batches.of_fields(fields | {"cursors": by_shard})
        )


def _sealed(fields: dict[str, storage.Json]) -> str:
    return json.dumps(checked_json.sealed(fields, version=_VERSION))


def _unsealed(name: str, entry: Any) -> dict[str, Any]:
    try:
        text = entry.encode() if isinstance(entry, str) else b""
        fields = checked_json.parse(text, what="data state", version=_VERSION)
    except checked_json.UnreadableError as problem:
        raise errors.DataError(
            f"the entry {name!r} of the data state {problem}; load another step"
        ) from None
    del fields["version"]
    return fields
