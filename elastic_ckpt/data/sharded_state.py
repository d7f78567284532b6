"""The state of a PyTorch loader by logical shard, for `torch.distributed.checkpoint`.

In that library, the first rank with an entry writes it under the entry's name, and each
rank reads the entries that it names. Because entries are named by logical shard, not by
rank, any number of ranks can read a state that any other number saved, without a
collective. `FORMAT.md` describes the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elastic_ckpt.core import checked_json
from elastic_ckpt.data import cursors, state

if TYPE_CHECKING:
    # This module imports torch.
    from elastic_ckpt.data import local_batches, torch_loader


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
        saved = state.of_parts({"the loader's state": self._rows.state_dict()})
        held = dict(saved.cursors)
        if not saved.row:
            # No shard has been read.
            held = dict.fromkeys(range(saved.pipeline.get(state.NUM_SHARDS, 0))) | held
        parts = {
            f"shard_{shard:05d}": cursors.to_part({shard: cursor}, saved.position)
            for shard, cursor in held.items()
        }
        return {
            name: checked_json.to_bytes(part, version=cursors.VERSION).decode()
            for name, part in ({"position": state.to_fields(saved)} | parts).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Moves to a state that any number of ranks saved.

        Raises:
          DataError: if an entry is missing, was altered, or is from a different step;
            see also `LocalBatches.set_state`.
        """
        parts = {f"the entry {name!r}": part for name, part in state_dict.items()}
        self._rows.load_state_dict(state.to_json(state.of_parts(parts)))
