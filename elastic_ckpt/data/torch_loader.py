"""The rows of one rank through torchdata's `StatefulDataLoader`.

The loader takes batches from its n workers round-robin, so each worker produces every
n-th batch of the rank (`local_batches.of_worker`). The workers' states after their last
delivered batches are merged into the rank's state (`local_batches.merged`), which does
not depend on the number of workers or ranks.

Only this module of the library imports torch and torchdata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import data as torch_data
from torchdata import stateful_dataloader

from elastic_ckpt.data import local_batches, state


class TorchLoader(stateful_dataloader.StatefulDataLoader):
    """One rank's rows of each global batch as tensors, with any number of workers.

    It is torchdata's `StatefulDataLoader`, with a state that any number of ranks and
    workers can load. The batches do not depend on the number of workers. An iteration
    continues where the previous one stopped; after the end of finite data, it starts
    another pass. `persistent_workers` has no effect.

    Save `state_dict()` on each rank. To resume, pass the list of all states to
    `load_state_dict` on every rank.

    Args:
      batches: the rows of this rank.
      **options: options of `StatefulDataLoader`, such as `num_workers`.
    """

    def __init__(self, batches: local_batches.LocalBatches, **options: Any) -> None:
        super().__init__(_Rows(batches), batch_size=None, **options)
        self._batches = batches

    def __iter__(self) -> Any:
        if self._has_workers:
            # New workers begin at the position of `_batches`.
            self.load_state_dict(self.state_dict())
        if self._batches.at_end:
            self._batches.reset()
        return super().__iter__()

    def state_dict(self) -> state.StateDict:
        """The state after the last delivered batch, even if workers are far ahead.

        With `snapshot_every_n_steps`, this rereads the batches since the last snapshot.
        """
        if not self._has_workers:
            return self._batches.get_state()
        saved = super().state_dict()
        workers = saved["_snapshot"]["_worker_snapshots"].values()
        states = [worker["fetcher_state"]["dataset_iter_state"] for worker in workers]
        ended = saved["_iterator_finished"]
        merged = local_batches.merged(states, at_end=ended)
        batches = local_batches.of_worker(self._batches, 0, 1, merged)
        for _ in range(0 if ended else saved["_steps_since_snapshot"]):
            next(batches)
        batches.close()
        return batches.get_state()

    @property
    def _has_workers(self) -> bool:
        return self.num_workers > 0 and self._iterator is not None

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Moves to a state, or to the combined states of all ranks of any world.

        A running iteration does not move; start a new one.

        Raises:
          DataError: see `LocalBatches.set_state`.
        """
        self._batches.set_state(state_dict)
        # The next iteration starts new workers.
        super().load_state_dict({})


class _Rows(torch_data.IterableDataset):
    """The dataset of a loader and its workers."""

    def __init__(self, batches: local_batches.LocalBatches) -> None:
        super().__init__()
        self._batches = batches

    def __iter__(self) -> local_batches.LocalBatches:
        info = torch_data.get_worker_info()
        if info is None:
            return self._batches
        return local_batches.of_worker(self._batches, info.id, info.num_workers)
