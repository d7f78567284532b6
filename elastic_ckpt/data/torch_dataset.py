"""The rows of one rank as a PyTorch dataset, for torchdata's `StatefulDataLoader`.

This is the only module that imports torch, and no other module of ours imports it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches


class TorchDataset(torch_data.IterableDataset):
    """The rows of one rank from each global batch; a loader saves its state.

    Pass it to a `StatefulDataLoader` with `batch_size=None` and at most one worker. For
    more processes use `num_workers` of the data, which does not change the state. A
    plain `DataLoader` cannot read the state of a worker, so it must have none. An
    iteration continues after the previous one; after the end of finite data, it is
    another pass over it.

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
                " use num_workers=0 or 1, and num_workers of the data for more"
                " processes"
            )
        # PyTorch gives a dataset no access to its loader except the number of workers.
        frames = [
            (frame.f_globals.get("__name__", "").partition(".")[0], frame)
            for frame, _ in traceback.walk_stack(None)
        ]
        is_stateful = any(package == "torchdata" for package, _ in frames)
        if info is not None and not is_stateful:
            raise errors.ConfigError(
                "a DataLoader's state_dict would not contain the position of its"
                " worker; use torchdata's StatefulDataLoader, or num_workers=0, and"
                " num_workers of the data for more processes"
            )
        if any(
            frame.f_locals.get("auto_collation") is True
            for package, frame in frames
            if package in ("torch", "torchdata")
        ):
            raise errors.ConfigError(
                "the dataset yields whole batches, and the loader would batch them"
                " again; set its batch_size=None"
            )
        if self.batches.at_end:
            self.batches.reset()
        return self.batches

    def state_dict(self) -> local_batches.StateDict:
        """The state after the last batch."""
        return self.batches.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Moves to a state, or to the combined state of several ranks."""
        self.batches.set_state(state_dict)
