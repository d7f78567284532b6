"""The rows of one host as NumPy arrays, for PyTorch and other training loops.

`LocalBatches` is a plain iterator with the state methods of both Grain, `get_state` and
`set_state`, and torchdata, `state_dict` and `load_state_dict`. `data.torch_loader`
wraps it in a PyTorch loader.

A state is JSON (`FORMAT.md`). A rank's state contains the cursors of the shards that it
runs, so a world of a different size loads the states of all ranks together:
`load_state_dict([one, two])`.

The workers of a PyTorch loader take a rank's batches round-robin (`of_worker`). A
worker's state contains the rank's position after the worker's last batch, and the
cursors of the worker's shards; `merged` combines the states of all workers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.data import (
    cursors,
    delivery,
    elastic_data,
    prefetch,
    rows,
    stages,
    state,
)

if TYPE_CHECKING:
    # This module imports torch.
    from elastic_ckpt.data import torch_loader


class LocalBatches:
    """One rank's rows of each global batch, as NumPy arrays, without JAX devices.

    For PyTorch and other frameworks, and for tests; `ec.batches` is for JAX programs.
    The state is JSON, and any number of ranks can load it.

    Args:
      data: the result of `ec.data.from_config`, `positional` or `sharded`.
      rank: the index of this process, from 0.
      num_ranks: the number of processes.
      global_batch_size: the number of rows in a global batch, B; each rank gets B /
        num_ranks.
      agree: a function that all-reduces a bool and returns whether any rank passed
        True; required if multiple ranks read finite data.
      read_ahead: how far a thread reads ahead: a number of batches or an
        `ec.data.ReadAhead`. By default, nothing is read ahead.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        global_batch_size: int,
        agree: Callable[[bool], bool] | None = None,
        read_ahead: prefetch.ReadAhead | int = prefetch.IN_CALLER,
    ) -> None:
        elastic_data.check(data, caller="LocalBatches")
        global_batch_size = elastic_data.batch_size(
            global_batch_size, caller="LocalBatches"
        )
        if not 0 <= rank < num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: rank={rank} is invalid with num_ranks={num_ranks}; pass"
                " a rank from 0 to num_ranks - 1"
            )
        course = stages.Course.first(data, global_batch_size)
        for size in course.sizes:
            if size < 1 or size % num_ranks:
                raise errors.ConfigError(
                    f"LocalBatches: global_batch_size={size} cannot be divided evenly"
                    f" among {num_ranks} ranks; choose a positive multiple of num_ranks"
                    " for every stage of the data"
                )
        if data.end is not elastic_data.End.NEVER and num_ranks > 1 and agree is None:
            raise errors.ConfigError(
                "LocalBatches: finite data must end after the same batch on all"
                f" {num_ranks} ranks; pass agree=, a function that all-reduces a bool"
                " across the ranks"
            )
        self._identity = data.identity()
        self._finite = data.end is not elastic_data.End.NEVER
        self._agree = agree or bool
        self._rank, self._num_ranks = rank, num_ranks
        self._read_ahead = prefetch.ReadAhead.of(read_ahead)
        # A loader's worker takes every `_num_workers`-th batch; `_skips` batches come
        # before its next one.
        self._num_workers, self._worker = 1, 0
        self._rows: Any = None
        self._begin(course)
        if rank == 0:
            ranks = rows.in_order(num_ranks, course.size, later=course.sizes)
            delivery.warn_of_shared_shards(data, ranks)

    def __getstate__(self) -> dict[str, Any]:
        # For a spawned process, which must read the batches ahead itself.
        return vars(self) | {"_rows": self.get_state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled | {"_rows": None})
        self.set_state(pickled["_rows"])

    def __iter__(self) -> LocalBatches:
        return self

    def __len__(self) -> int:
        raise TypeError(
            "LocalBatches has no length, which PyTorch's DataLoader asks for; use"
            " ec.data.TorchLoader(batches, ...)"
        )

    def __bool__(self) -> bool:
        return True

    @property
    def at_end(self) -> bool:
        """Whether the data has ended; if so, `reset` starts another pass."""
        return self._at_end

    def __next__(self) -> dict[str, np.ndarray]:
        course = self._course.due()
        if course is not self._course:
            self._move(course, self._rows.get_state())
        num_steps = self._skips + 1
        # To detect the end, a worker must also see the other workers' batches.
        while self._finite and self._skips:
            self._next()
            self._skips -= 1
        batch = self._next()
        self._skips = self._num_workers - 1
        for _ in range(num_steps):
            self._course = self._course.next()
        return batch

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps so far in a run with stages.

        Call this only after loading a state that was saved without stages.

        Raises:
          DataError: if a new stage would have begun before that step.
        """
        self._course = self._course.at_step(step)

    def _next(self) -> dict[str, np.ndarray]:
        course = self._course
        for _ in range(delivery.batches_of_end(course.data, course.size)):
            batch = next(self._rows)
            if not self._finite or self._agree(bool(batch[elastic_data.MASK].any())):
                return batch
        self._at_end = True
        raise StopIteration

    def reset(self) -> None:
        """Moves to the beginning."""
        self._begin(stages.Course.first(self._course.data, self._course.base_size))

    def get_state(self) -> state.StateDict:
        """The state after the last batch, as JSON."""
        # Includes shards that other ranks also run, so a rank can resume from its own
        # state.
        position, held = self._rows.get_state()
        return state.to_json(
            state.LoaderState(
                engine=self._course.data.engine,
                position=position,
                pipeline=self._identity,
                progress=self._course.progress,
                at_end=self._at_end,
                cursors=held,
            )
        )

    def set_state(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Moves to a state, or to the combined state of all ranks of a world.

        Raises:
          DataError: if a state is invalid, was altered, or has a different pipeline or
            version; if the ranks' states are from different steps; or if shard cursors
            are missing. After an error, the position is unchanged.
        """
        ranks = saved if isinstance(saved, list | tuple) and saved else [saved]
        named = {f"the state of rank {rank}": each for rank, each in enumerate(ranks)}
        loaded = state.of_parts(named)
        state.check_same_pipeline(loaded, self._course.data.engine, self._identity)
        self._move(self._course.restored(loaded), (loaded.position, loaded.cursors))
        self._skips, self._at_end = self._worker, loaded.at_end

    def state_dict(self) -> state.StateDict:
        """`get_state` under torchdata's name."""
        return self.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """`set_state` under torchdata's name."""
        self.set_state(state_dict)

    def close(self) -> None:
        """Stops reading ahead."""
        self._rows.close()

    def _begin(self, course: stages.Course) -> None:
        self._move(course)
        self._skips, self._at_end = self._worker, False

    def _move(self, course: stages.Course, to: cursors.HostState | None = None) -> None:
        # Moves to the beginning if `to` is None. Changes nothing if it fails.
        ranks = rows.in_order(self._num_ranks, course.size, later=course.sizes)
        placement = ranks[self._rank]
        if self._num_workers > 1 and not self._finite:
            placement = dataclasses.replace(
                placement, later={}, every=self._num_workers, first=self._worker
            )
        moved = prefetch.Prefetched(
            course.data.host_batches(placement), make=dict, read_ahead=self._read_ahead
        )
        if to is not None:
            position, held = to
            moved.go_to(position, functools.partial(cursors.chosen, held))
        if self._rows is not None:
            # So that only one thread reads at a time.
            self._rows.close()
        self._course, self._rows = course, moved


def of_worker(
    batches: LocalBatches,
    worker: int,
    num_workers: int,
    saved: Mapping[str, Any] | None = None,
) -> LocalBatches:
    """The batches of one worker of a rank's loader: every `num_workers`-th.

    They begin at `saved`, or at the position of `batches`. Worker 0 gets the first
    batch, worker 1 the second, and so on.

    Raises:
      ConfigError: if the workers would have to agree with each other on a stage, or
        with other ranks on the end of finite data.
    """
    finite_ranks = batches._finite and batches._num_ranks > 1
    if num_workers > 1 and (finite_ranks or len(batches._course.sizes) > 1):
        raise errors.ConfigError(
            f"the {num_workers} workers of a loader take batches round-robin, so they"
            " cannot agree with other ranks on the end of finite data, or with each"
            " other on when stages begin; set num_workers=0 in the loader and, to use"
            " more processes, set num_workers in ec.data.sharded (grain_worker_count in"
            " a configuration)"
        )
    if not (worker or batches._rank or batches._finite):
        (whole,) = rows.in_order(1, batches._course.size)
        each = [
            dataclasses.replace(whole, every=num_workers, first=number)
            for number in range(num_workers)
        ]
        delivery.warn_of_shared_shards(batches._course.data, each)
    other = copy.copy(batches)
    other._num_workers, other._worker = num_workers, worker
    other.set_state(saved or batches.get_state())
    return other


def merged(
    states: Sequence[Mapping[str, Any]], *, at_end: bool = False
) -> state.StateDict:
    """Merges the states of all workers of a rank's loader into the rank's state.

    Args:
      states: each worker's state after its last batch that the loader delivered.
      at_end: whether the loader has delivered all batches.

    Raises:
      DataError: if a state is invalid.
    """
    parsed = [
        state.of_parts({f"the state of worker {number}": each})
        for number, each in enumerate(states)
    ]
    # The worker with the last batch has the rank's position.
    last = max(parsed, key=lambda each: each.row)
    newest = cursors.newest(each.cursors for each in parsed)
    return state.to_json(dataclasses.replace(last, cursors=newest, at_end=at_end))


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

    # In that library, the first rank with an entry writes it under its name, and
    # each rank reads the entries that it names. Because entries are named by logical
    # shard, not by rank, any number of ranks can read a state that any other number
    # saved, without a collective. `FORMAT.md` describes the entries.

    def __init__(self, rows: torch_loader.TorchLoader | LocalBatches) -> None:
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
