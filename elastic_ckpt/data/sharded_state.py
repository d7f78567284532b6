"""The state of a PyTorch loader by logical shard, for `torch.distributed.checkpoint`.

In that library, the first rank with an entry writes it under the entry's name, and each
rank reads the entries that it names. Because entries are named by logical shard, not by
rank, any number of ranks can read a state that any other number saved, without a
collective. `FORMAT.md` describes the entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import local_batches, state

if TYPE_CHECKING:
    # This module imports torch.
    from elastic_ckpt.data import torch_loader

_POSITION = "position"


class ShardedState:
    """The state of a rank's rows by logical shard, which any number of ranks can load.

    It is a `Stateful` of `torch.distributed.checkpoint`. Save it next to the model:

        dcp.save({"model": model, "data": ec.data.ShardedState(loader)}, ...)
        dcp.load({"model": model, "data": ec.data.ShardedState(loader)}, ...)

    Load it before the first batch, while `state_dict` has the entries of all shards;
    later it has only this rank's entries.

    Args:
      rows: the `TorchLoader` or `LocalBatches` of this rank.
    """

    def __init__(
        self, rows: torch_loader.TorchLoader | local_batches.LocalBatches
    ) -> None:
        self._rows = rows

    def state_dict(self) -> dict[str, str]:
        """The entries of this rank: `position`, and `shard_00017` for each shard."""
        fields: dict[str, Any] = dict(self._rows.state_dict())
        by_shard: dict[str, storage.Json] = fields.pop("cursors")
        position = fields["position"]
        if not state.row_of(position):
            # No shard has been read.
            num_shards = fields["pipeline"].get(state.NUM_SHARDS, 0)
            by_shard = dict.fromkeys(map(str, range(num_shards))) | by_shard
        entries = {_POSITION: fields}
        for shard, cursor in by_shard.items():
            name = f"shard_{int(shard):05d}"
            entries[name] = {"position": position, "cursor": cursor}
        return {
            name: json.dumps(local_batches.of_fields(entry))
            for name, entry in entries.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Moves to a state that any number of ranks saved.

        Raises:
          DataError: if an entry is missing, was altered, or is from a different step;
            see also `LocalBatches.set_state`.
        """
        entries = {name: _unsealed(name, each) for name, each in state_dict.items()}
        if _POSITION not in entries:
            raise errors.DataError(
                f"the state has no entry {_POSITION!r}, only {sorted(entries)[:5]};"
                " load a state that a ShardedState saved"
            )
        fields = entries.pop(_POSITION)
        by_shard = {}
        for name, entry in entries.items():
            if entry["position"] != fields["position"]:
                raise errors.DataError(
                    f"the entry {name!r} of the data state is at position"
                    f" {entry['position']}, but the others are at"
                    f" {fields['position']}; load all entries from the same checkpoint"
                )
            by_shard[str(int(name.removeprefix("shard_")))] = entry["cursor"]
        self._rows.load_state_dict(
            local_batches.of_fields(fields | {"cursors": by_shard})
        )


def _unsealed(name: str, entry: Any) -> dict[str, Any]:
    try:
        text = entry.encode() if isinstance(entry, str) else b""
        return checked_json.parse(
            text, what="data state", version=local_batches.VERSION
        )
    except checked_json.UnreadableError as problem:
        raise errors.DataError(
            f"the entry {name!r} of the data state {problem}; load a different step"
        ) from None
