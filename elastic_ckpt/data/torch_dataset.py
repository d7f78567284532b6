"""The rows of one rank as a PyTorch dataset, for torchdata's `StatefulDataLoader`.

This is the only module that imports torch, and no other module of ours imports it.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches


class TorchDataset(torch_data.IterableDataset):
    """One rank's rows of each global batch, for a loader of PyTorch.

    Pass it to torchdata's `StatefulDataLoader` with `batch_size=None` and at most one
    worker, and save the loader's state; or to a `DataLoader` without workers. To read
    with more processes, set `num_workers` of the data, on which the state does not
    depend. An iteration continues where the one before stopped; after the end of finite
    data, it starts another pass.

    Args:
      batches: the rows of this rank.
    """

    def __init__(self, batches: local_batches.LocalBatches) -> None:
        super().__init__()
        self.batches = batches
        # The iterators of loaders that began before the last `load_state_dict`.
        self._abandoned: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {"batches": self.batches, "_abandoned": weakref.WeakSet()}

    def __iter__(self) -> local_batches.LocalBatches:
        info = torch_data.get_worker_info()
        if info is not None and info.num_workers > 1:
            raise errors.ConfigError(
                f"each of the {info.num_workers} workers of the DataLoader would read"
                " every row; use num_workers=0 or 1, and set num_workers of the data to"
                " use more processes"
            )
        # PyTorch gives a dataset no access to its loader except the number of workers.
        frames = [
            (frame.f_globals.get("__name__", "").partition(".")[0], frame)
            for frame, _ in traceback.walk_stack(None)
        ]
        is_stateful = any(package == "torchdata" for package, _ in frames)
        if info is not None and not is_stateful:
            raise errors.ConfigError(
                "the DataLoader's state_dict would not contain the position of its"
                " worker process; use torchdata's StatefulDataLoader, or num_workers=0"
                " with num_workers of the data for more processes"
            )
        if any(
            frame.f_locals.get("auto_collation") is True
            for package, frame in frames
            if package in ("torch", "torchdata")
        ):
            raise errors.ConfigError(
                "the dataset yields whole batches, which the DataLoader would batch"
                " again; pass batch_size=None to it"
            )
        if self.batches.at_end:
            self.batches.reset()
        return self.batches

    def state_dict(self) -> local_batches.StateDict:
        """The state after the last batch that its loader has delivered."""
        if torch_data.get_worker_info() is None:
            states = self._loader_states()
            if len(states) > 1:
                # Loaders that were dropped may wait for the garbage collector.
                gc.collect()
                states = self._loader_states()
            if len(states) > 1:
                raise errors.DataError(
                    f"{len(states)} loaders read this dataset, and each has a position"
                    " of its own; make a dataset for each loader"
                )
            for loader_state in states:
                return self._delivered(loader_state)
        return self.batches.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Moves to a state, or to the combined states of all ranks."""
        self.batches.set_state(state_dict)
        self._abandoned = weakref.WeakSet(
            loader._iterator
            for loader in self._loaders()
            if loader._iterator is not None
        )

    def _loaders(self) -> list[Any]:
        # torchdata's loaders of this dataset: none tells its dataset that it exists.
        torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
        return [
            each
            for each in gc.get_objects()
            if torchdata is not None
            and issubclass(type(each), torchdata.StatefulDataLoader)
            and vars(each).get("dataset") is self
        ]

    def _loader_states(self) -> list[Mapping[str, Any]]:
        # The states of loaders whose position is not that of `batches`.
        states = []
        for loader in self._loaders():
            iterator = loader._iterator
            if loader.next_iter_state is not None:
                # It was loaded, and counts from the next iteration on.
                states.append(loader.next_iter_state)
            elif (
                loader.num_workers
                and iterator is not None
                and iterator not in self._abandoned
            ):
                states.append(iterator.state_dict())
        return states

    def _delivered(self, loader_state: Mapping[str, Any]) -> local_batches.StateDict:
        workers = loader_state.get("_snapshot", {}).get("_worker_snapshots")
        (process,) = workers.values() if workers else [loader_state]
        saved = process["fetcher_state"]["dataset_iter_state"]
        # The state of a worker comes with every `snapshot_every_n_steps`th batch.
        behind = loader_state.get("_steps_since_snapshot", 0)
        if not behind:
            return saved
        batches = self.batches.at(saved)
        for _ in range(behind):
            next(batches)
        batches.close()
        return batches.get_state()
