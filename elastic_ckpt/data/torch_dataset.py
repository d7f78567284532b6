"""The rows of one rank as a PyTorch dataset, for torchdata's `StatefulDataLoader`.

The one module that imports torch; nothing else of ours imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches


class TorchDataset(torch_data.IterableDataset):
    """Global batches' rows of one rank, whose state a loader saves with its own.

    Give it to a `StatefulDataLoader` with `batch_size=None` and at most one worker:
    processes of our own (`num_workers` of the data) share the work, and leave no trace
    in the state.

    Args:
      batches: the rows.
    """

    def __init__(self, batches: local_batches.LocalBatches) -> None:
        super().__init__()
        self.batches = batches

    def __iter__(self) -> local_batches.LocalBatches:
        info = torch_data.get_worker_info()
        if info is not None and info.num_workers > 1:
            raise errors.ConfigError(
                f"{info.num_workers} workers of a DataLoader would each read every row;"
                " use num_workers=0 or 1, and num_workers of the data for processes"
            )
        return self.batches

    def state_dict(self) -> local_batches.StateDict:
        """The state after the last batch."""
        return self.batches.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Goes to a state, or to that which several ranks saved together."""
        self.batches.set_state(state_dict)
