"""The rows of one rank as a PyTorch dataset, for torchdata's `StatefulDataLoader`.

The one module that imports torch; nothing else of ours imports it.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoaderFrames:
    """What the frames on the stack show of the loader that iterates.

    A dataset can learn nothing of its loader but the number of its workers.

    Attributes:
      is_stateful: whether it is torchdata's, which saves the state of its workers.
      batches_again: whether it makes batches of what the dataset yields.
    """

    is_stateful: bool
    batches_again: bool

    @classmethod
    def of_caller(cls) -> _LoaderFrames:
        """The loader that called, if one did."""
        frames = [
            (frame.f_globals.get("__name__", "").partition(".")[0], frame)
            for frame, _ in traceback.walk_stack(None)
        ]
        return cls(
            is_stateful=any(package == "torchdata" for package, _ in frames),
            batches_again=any(
                frame.f_locals.get("auto_collation") is True
                for package, frame in frames
                if package in ("torch", "torchdata")
            ),
        )


class TorchDataset(torch_data.IterableDataset):
    """Global batches' rows of one rank, whose state a loader saves with its own.

    Give it to a `StatefulDataLoader` with `batch_size=None` and at most one worker:
    processes of our own (`num_workers` of the data) share the work, and leave no trace
    in the state. A plain `DataLoader` has no way to ask a worker for its state, and
    may have none. An iteration continues where the last one stopped; one after the end
    of finite data is another pass over it.

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
        loader = _LoaderFrames.of_caller()
        if info is not None and not loader.is_stateful:
            raise errors.ConfigError(
                "a DataLoader's state_dict would not have the position of its worker;"
                " use torchdata's StatefulDataLoader, or num_workers=0, and num_workers"
                " of the data for processes"
            )
        if loader.batches_again:
            raise errors.ConfigError(
                "the rows of a global batch come together, and the loader would batch"
                " them again; give it batch_size=None"
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
        """Goes to a state, or to that which several ranks saved together."""
        self.batches.set_state(state_dict)
