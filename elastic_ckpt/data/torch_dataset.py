"""The rows of one rank as a PyTorch dataset, for torchdata's `StatefulDataLoader`.

The loader deals its batches to its workers in turn, so each worker makes every n-th
batch of the rank (`local_batches.of_worker`), and its state is that after its last
batch which the loader delivered. A shard's cursor is that of the worker which was the
last to read it (`local_batches.merged`). The state of the rank therefore depends on the
number of workers no more than on that of ranks.

Of the library, only this module imports torch.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches


class TorchDataset(torch_data.IterableDataset):
    """One rank's rows of each global batch, for a loader of PyTorch.

    Pass it to torchdata's `StatefulDataLoader` with `batch_size=None` and any number of
    workers, or to a `DataLoader` without workers. The batches are the same with each
    number of workers. An iteration continues where the one before stopped; after the
    end of finite data, it starts another pass.

    To resume, save `state_dict()` of the dataset or of its loader on each rank, and
    pass the list of all of them to `load_state_dict` of the dataset, on any number of
    ranks and with any number of workers.

    Args:
      batches: the rows of this rank.
    """

    def __init__(self, batches: local_batches.LocalBatches) -> None:
        super().__init__()
        self.batches = batches
        # In a worker, what its loader iterates over.
        self._of_worker: local_batches.LocalBatches | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked begins where the loader's last iteration stopped.
        return {"batches": self._at_delivered(), "_of_worker": None}

    def __iter__(self) -> local_batches.LocalBatches | _Ahead:
        info = torch_data.get_worker_info()
        # PyTorch gives a dataset no access to its loader except the number of workers.
        frames = [
            (frame.f_globals.get("__name__", "").partition(".")[0], frame)
            for frame, _ in traceback.walk_stack(None)
        ]
        is_stateful = any(package == "torchdata" for package, _ in frames)
        if info is not None and not is_stateful:
            raise errors.ConfigError(
                "the DataLoader's state_dict would not contain the position of its"
                " worker processes; use torchdata's StatefulDataLoader, or"
                " num_workers=0 with num_workers of the data for more processes"
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
        if info is not None:
            return self._begin_in_worker(info.id, info.num_workers)
        if self.batches.at_end:
            self.batches.reset()
        return self.batches

    def state_dict(self) -> local_batches.StateDict:
        """The state after the last batch that its loader has delivered."""
        if torch_data.get_worker_info() is not None:
            # A loader saves it beside the state of the worker's iterator.
            return {}
        states = self._loader_states()
        if len(states) > 1:
            # Loaders that were dropped may wait for the garbage collector.
            gc.collect()
            states = self._loader_states()
        return self._delivered(states)

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Moves to a state, or to the combined states of all ranks.

        Args:
          state_dict: the `state_dict()` of a dataset, or that of its loader, or a list
            of those of all ranks. The numbers of ranks and workers may differ from
            those that saved it. A running iteration is not moved; begin another one.

        Raises:
          DataError: as `LocalBatches.set_state`, or if the loaders of the ranks took
            their last snapshots at different steps.
        """
        if torch_data.get_worker_info() is not None and not state_dict:
            return
        given: Any = state_dict
        behind = {0}
        if isinstance(given, Mapping):
            given, steps = _of_rank(given)
            behind = {steps}
        elif isinstance(given, Sequence) and given and not isinstance(given, str):
            taken = [_of_rank(each) for each in given]
            given = [state for state, _ in taken]
            behind = {steps for _, steps in taken}
        if len(behind) > 1:
            raise errors.DataError(
                f"the loaders of the ranks had delivered {sorted(behind)} batches since"
                " their last snapshots; load states that were saved at the same step"
                " with the same snapshot_every_n_steps"
            )
        self.batches.set_state(given)
        for _ in range(behind.pop()):
            next(self.batches)
        for loader in self._loaders():
            # Another iteration has to begin, in workers that have the new state.
            _stateful_loader().load_state_dict(loader, {})

    def _begin_in_worker(
        self, worker: int, num_workers: int
    ) -> local_batches.LocalBatches | _Ahead:
        if self._of_worker is None:
            # A forked worker has the loader, too, with its iteration before.
            self.batches = self._at_delivered()
        elif self._of_worker.at_end:
            self.batches.reset()
        else:
            return _Ahead(self._of_worker)
        if self.batches.at_end:
            self.batches.reset()
        self._of_worker = local_batches.of_worker(self.batches, worker, num_workers)
        return self._of_worker

    def _at_delivered(self) -> local_batches.LocalBatches:
        # The batches after those that the loader has delivered.
        states = self._loader_states()
        return self.batches.at(self._delivered(states)) if states else self.batches

    def _loaders(self) -> list[Any]:
        # torchdata's loaders of this dataset: none tells its dataset that it exists.
        stateful = _stateful_loader()
        return [
            each
            for each in gc.get_objects()
            if stateful is not None
            and issubclass(type(each), stateful)
            and vars(each).get("dataset") is self
        ]

    def _loader_states(self) -> list[Mapping[str, Any]]:
        # The states of loaders whose position is not that of `batches`.
        states = []
        for loader in self._loaders():
            if loader.next_iter_state is not None:
                # It was loaded, and counts from the next iteration on.
                states.append(loader.next_iter_state)
            elif loader.num_workers and loader._iterator is not None:
                states.append(loader._iterator.state_dict())
        return states

    def _delivered(
        self, loader_states: Sequence[Mapping[str, Any]]
    ) -> local_batches.StateDict:
        if not loader_states:
            return self.batches.get_state()
        if len(loader_states) > 1:
            raise errors.DataError(
                f"{len(loader_states)} loaders read this dataset, and each has a"
                " position of its own; make a dataset for each loader"
            )
        saved, behind = _of_rank(loader_states[0])
        if not behind:
            return saved
        batches = self.batches.at(saved)
        for _ in range(behind):
            next(batches)
        batches.close()
        return batches.get_state()


class _Ahead:
    """What a worker yields that does not know what its loader has delivered.

    An exception of `TorchDataset.__iter__` would be lost with the worker.
    """

    def __init__(self, batches: local_batches.LocalBatches) -> None:
        self.state_dict = batches.state_dict
        self.load_state_dict = batches.load_state_dict

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> None:
        raise errors.DataError(
            "a loader with persistent_workers=True began another iteration before the"
            " end of the data, and its workers have read ahead; go on with the same"
            " iterator, or set persistent_workers=False"
        )


def _stateful_loader() -> Any:
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata and torchdata.StatefulDataLoader


def _of_rank(saved: Any) -> tuple[Any, int]:
    """The state of a rank in that of its loader, and how many batches it is behind."""
    if not isinstance(saved, Mapping):
        return saved, 0
    if "_snapshot" in saved:
        # The state of workers comes with every `snapshot_every_n_steps`th batch.
        behind = saved["_steps_since_snapshot"]
        workers = saved["_snapshot"]["_worker_snapshots"].values()
    elif "fetcher_state" in saved:
        behind, workers = 0, [saved]
    else:
        return saved, 0
    state = local_batches.merged(
        [worker["fetcher_state"]["dataset_iter_state"] for worker in workers]
    )
    if saved["_iterator_finished"]:
        return local_batches.ended(state), 0
    return state, behind
