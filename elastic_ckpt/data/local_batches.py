"""The rows of one host as NumPy arrays, for PyTorch and other training loops.

`LocalBatches` is a plain iterator with the state methods of both Grain, `get_state` and
`set_state`, and torchdata, `state_dict` and `load_state_dict`. `data.torch_loader`
puts it under a loader of PyTorch.

A state is JSON. The state of a rank has the cursors of the shards that it runs, so a
world of another size loads the states of all ranks together:
`load_state_dict([one, two])`.

The workers of a PyTorch loader take the batches of a rank in turn (`of_worker`). Their
states have three more fields: `num_workers`, `worker`, and `skips`, the number of
batches of other workers before the next one. `merged` makes of them the state of the
rank. States of data with stages have `progress`, as in `data.state`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import (
    cursors,
    delivery,
    elastic_data,
    prefetch,
    rows,
    shard_rows,
    stages,
    state,
)

_VERSION = 1

# The fields that only states of workers have.
_OF_WORKERS = ("num_workers", "worker", "skips")

_FIELDS = {"engine": str, "position": dict, "pipeline": dict, "cursors": dict}

StateDict = dict[str, storage.Json]
# The number of a shard, or its name in JSON.
_K = TypeVar("_K", int, str)


class LocalBatches:
    """One rank's rows of each global batch, as NumPy arrays, without JAX devices.

    For PyTorch and other frameworks, and for tests; `ec.batches` gives a JAX program
    global arrays. Its state is JSON, and one of another number of ranks can be loaded.

    Args:
      data: from `ec.data.from_config`, `positional` or `sharded`.
      rank: the number of this process.
      num_ranks: the number of processes.
      global_batch_size: rows of all ranks together, B; each has B / num_ranks of them.
      agree: an all-reduce of a bool over the ranks, needed if finite data is read by
        several: whether any rank passes True.
      read_ahead: how far a thread reads ahead: a number of batches, or
        `ec.data.ReadAhead`. By default nothing is read ahead.
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
                f"LocalBatches: rank={rank} of num_ranks={num_ranks}; ranks are"
                " numbered from 0 to num_ranks - 1"
            )
        if global_batch_size < 1 or global_batch_size % num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: global_batch_size={global_batch_size} cannot be"
                f" divided evenly among num_ranks={num_ranks}; choose a positive"
                " multiple of num_ranks"
            )
        if data.end is not elastic_data.End.NEVER and num_ranks > 1 and agree is None:
            raise errors.ConfigError(
                f"LocalBatches: finite data must end on all {num_ranks} ranks at once;"
                " pass agree=, a function that all-reduces a bool over the ranks"
            )
        self._course = stages.Course.first(data, global_batch_size)
        self._identity = data.identity()
        self._agree = agree or bool
        self._rank, self._num_ranks = rank, num_ranks
        for size in self._course.sizes:
            if size % num_ranks:
                raise errors.ConfigError(
                    f"LocalBatches: a stage of the data has global_batch_size={size},"
                    f" which cannot be divided evenly among num_ranks={num_ranks};"
                    " choose a multiple"
                )
        self._read_ahead = prefetch.ReadAhead.of(read_ahead)
        # As a worker of a loader, it takes every `_num_workers`-th batch.
        self._num_workers, self._worker, self._skips = 1, 0, 0
        self._rows = self._begin(self._course)
        self._at_end = False
        if rank == 0:
            course = self._course
            ranks = rows.in_order(num_ranks, course.size, later=course.sizes)
            delivery.warn_of_shared_shards(data, ranks)

    def __getstate__(self) -> dict[str, Any]:
        # For a process that is not forked: what was read ahead is read again there.
        kept = {name: each for name, each in vars(self).items() if name != "_rows"}
        return {"kept": kept, "state": self.get_state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled["kept"])
        self._rows = self._begin(self._course)
        self.set_state(pickled["state"])

    def __iter__(self) -> LocalBatches:
        return self

    @property
    def at_end(self) -> bool:
        """Whether the data has ended; then `reset` starts another pass."""
        return self._at_end

    def __next__(self) -> dict[str, np.ndarray]:
        self._begin_stage()
        batch = self._next()
        self._course = self._course.next()
        return batch

    def begin_at(self, step: int) -> None:
        """Says of which training step the next batch is, in a run of stages.

        Needed after a state was loaded of a run that had no stages yet.

        Raises:
          DataError: if a stage that is new to the run would have begun before.
        """
        self._course = self._course.at_step(step)

    def _begin_stage(self) -> None:
        course = self._course.due()
        if course is self._course:
            return
        now = self._rows.shard_cursors()
        begun = self._begin(course)
        begun.go_to(
            self._rows.position(),
            lambda shards: {shard: now[shard] for shard in shards},
        )
        self._rows.close()
        self._course, self._rows = course, begun

    def _next(self) -> dict[str, np.ndarray]:
        if self._course.data.end is elastic_data.End.NEVER:
            batch = next(self._rows)
        else:
            # Whether batches without a row are the end is known from all of them.
            while self._skips:
                self._next_of_finite()
                self._skips -= 1
            batch = self._next_of_finite()
        self._skips = self._num_workers - 1
        return batch

    def _next_of_finite(self) -> dict[str, np.ndarray]:
        course = self._course
        for _ in range(delivery.batches_of_end(course.data, course.size)):
            batch = next(self._rows)
            if self._agree(bool(batch[elastic_data.MASK].any())):
                return batch
        self._at_end = True
        raise StopIteration

    def reset(self) -> None:
        """Moves to the beginning."""
        self._rows.close()
        self._skips = self._worker
        self._course = stages.Course.first(self._course.data, self._course.base_size)
        self._rows, self._at_end = self._begin(self._course), False

    def get_state(self) -> StateDict:
        """The state after the last batch, as JSON."""
        # Also of shards that other ranks run, too: a rank can go on from its own state.
        run = self._rows.shard_cursors()
        fields: StateDict = {
            "engine": self._course.data.engine,
            "position": self._rows.position(),
            "pipeline": self._identity,
            "cursors": {str(shard): cursor for shard, cursor in run.items()},
            "at_end": self._at_end,
        }
        if self._course.progress is not None:
            fields["progress"] = dict(vars(self._course.progress))
        if self._num_workers > 1:
            own = (self._num_workers, self._worker, self._skips)
            fields |= dict(zip(_OF_WORKERS, own, strict=True))
        return checked_json.sealed(fields, version=_VERSION)

    def set_state(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Moves to a state, or to the combined state of all ranks of a world.

        Raises:
          DataError: if a state is invalid, was altered or is of another pipeline or
            version, if the states of the ranks are of different steps, or if cursors of
            shards are missing or differ. The position then does not change.
        """
        ranks = [saved] if isinstance(saved, Mapping) else saved
        if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
            raise errors.DataError(
                f"{saved!r} is not a state of LocalBatches; load what its get_state or"
                " state_dict returned, or a list of what it returned on all ranks"
            )
        checked = [_checked(each, rank) for rank, each in enumerate(ranks)]
        skips = self._skips_of(checked)
        position = checked[0]["position"]
        by_shard: dict[int, cursors.Cursor] = {}
        data_states = [
            state.DataState(
                **{key: fields[key] for key in ("engine", "position", "pipeline")},
                progress=state.progress_of(fields),
            )
            for fields in checked
        ]
        for rank, (fields, data_state) in enumerate(
            zip(checked, data_states, strict=True)
        ):
            state.check_same_pipeline(
                data_state, self._course.data.engine, self._identity
            )
            if data_state.position != position:
                raise errors.DataError(
                    f"the state of rank {rank} has position {data_state.position}, and"
                    f" that of rank 0 {position}; load states that were saved at the"
                    " same step"
                )
            added = {int(shard): cur for shard, cur in fields["cursors"].items()}
            differing = [s for s, cur in added.items() if _differ(cur, by_shard.get(s))]
            if differing:
                raise errors.DataError(
                    f"the state of rank {rank} has other cursors of logical shards"
                    f" {differing} than earlier ranks; load the states of one run"
                )
            by_shard = _newest(by_shard, added)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - by_shard.keys())
            if missing:
                raise errors.DataError(
                    f"the state lacks logical shards {missing}; load the states of all"
                    " ranks together, as a list"
                )
            return {shard: by_shard[shard] for shard in shards}

        course = self._course.restored(data_states[0])
        loaded = self._begin(course, skips)
        loaded.go_to(position, read)
        self._rows.close()
        self._course, self._rows = course, loaded
        self._skips = skips
        self._at_end = bool(checked[0].get("at_end"))

    def state_dict(self) -> StateDict:
        """`get_state` under torchdata's name."""
        return self.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """`set_state` under torchdata's name."""
        self.set_state(state_dict)

    def at(self, saved: Mapping[str, Any]) -> LocalBatches:
        """Another iterator over the same rows, at a state."""
        return self._of_worker(saved, num_workers=1, worker=0)

    def close(self) -> None:
        """Stops reading ahead."""
        self._rows.close()

    def _of_worker(
        self, saved: Mapping[str, Any], *, num_workers: int, worker: int
    ) -> LocalBatches:
        other = object.__new__(LocalBatches)
        vars(other).update(vars(self))
        other._num_workers, other._worker, other._skips = num_workers, worker, worker
        other._rows = other._begin(other._course)
        other.set_state(saved)
        return other

    def _skips_of(self, states: Sequence[Mapping[str, Any]]) -> int:
        # How many batches this worker skips first after it has loaded these states.
        workers = [fields for fields in states if "num_workers" in fields]
        if not workers:
            return self._worker
        own = {"num_workers": self._num_workers, "worker": self._worker}
        wrong = [fields for fields in workers if not own.items() <= fields.items()]
        if wrong or len(states) > 1:
            fields = (wrong or workers)[0]
            raise errors.DataError(
                f"a state is that of worker {fields['worker']} of"
                f" {fields['num_workers']} of a loader; load the state_dict of its"
                " ec.data.TorchLoader, which has all workers"
            )
        return workers[0]["skips"]

    def _begin(
        self, course: stages.Course, skips: int | None = None
    ) -> prefetch.Prefetched[dict[str, np.ndarray]]:
        placement = rows.Placement.in_order(
            self._rank,
            num_hosts=self._num_ranks,
            global_batch_size=course.size,
            later=course.sizes,
        )
        if self._num_workers > 1 and course.data.end is elastic_data.End.NEVER:
            placement = dataclasses.replace(
                placement,
                later={},
                every=self._num_workers,
                first=self._skips if skips is None else skips,
            )
        return prefetch.Prefetched(
            course.data.host_batches(placement),
            make=dict,
            read_ahead=self._read_ahead,
            at_most=course.batches_left,
        )


def of_worker(batches: LocalBatches, worker: int, num_workers: int) -> LocalBatches:
    """The batches that one worker of a rank's loader makes: every `num_workers`-th.

    They begin at the position of `batches`. Worker 0 has the first, worker 1 the
    second, and so on.

    Raises:
      ConfigError: if several ranks would have to agree on the end of finite data.
    """
    course = batches._course
    if num_workers > 1 and len(course.sizes) > 1:
        raise errors.ConfigError(
            f"{num_workers} workers of a loader take batches in turn, which stages of"
            " other sizes would mix up; use num_workers=0 in the loader, and set"
            " num_workers of the data to use more processes"
        )
    finite = course.data.end is not elastic_data.End.NEVER
    if num_workers > 1 and finite and batches._num_ranks > 1:
        raise errors.ConfigError(
            f"{num_workers} workers of a loader cannot agree with those of other ranks"
            " on the end of finite data; use num_workers=0 in the loader, and set"
            " num_workers of the data to use more processes"
        )
    return batches._of_worker(
        batches.get_state(), num_workers=num_workers, worker=worker
    )


def merged(states: Sequence[Mapping[str, Any]]) -> StateDict:
    """The state of a rank, from those of all workers of its loader.

    Each is the state after the last batch of this worker that the loader delivered.

    Raises:
      DataError: if a state is invalid or missing.
    """
    checked = [_checked(each, number) for number, each in enumerate(states)]
    if len(checked) == 1 and "num_workers" not in checked[0]:
        return dict(states[0])
    numbers = [fields.get("worker") for fields in checked]
    num_workers = checked[0].get("num_workers")
    if sorted(map(str, numbers)) != sorted(map(str, range(num_workers or 0))):
        raise errors.DataError(
            f"a loader had {num_workers} workers, but its state has those of workers"
            f" {numbers}; load the whole state of the loader"
        )
    # The worker with the last batch is at the position of the rank.
    last = max(checked, key=_row)
    by_shard = functools.reduce(_newest, (fields["cursors"] for fields in checked))
    kept = {name: each for name, each in last.items() if name not in _OF_WORKERS}
    return of_fields(kept | {"cursors": by_shard})


def ended(saved: Mapping[str, Any]) -> StateDict:
    """The state of a rank of which a loader has delivered all batches."""
    return of_fields(_checked(saved, 0) | {"at_end": True})


def of_fields(fields: Mapping[str, Any]) -> StateDict:
    """The state with these fields, and with version and digest."""
    kept = {
        name: each for name, each in fields.items() if name not in ("version", "digest")
    }
    return checked_json.sealed(kept, version=_VERSION)


def _row(fields: Mapping[str, Any]) -> int:
    return state.row_of(fields["position"])


def _newest(ones: dict[_K, Any], others: dict[_K, Any]) -> dict[_K, Any]:
    # The newest cursor of each shard.
    return {
        shard: max(ones.get(shard), others.get(shard), key=shard_rows.row_of)
        for shard in ones | others
    }


def _differ(one: Any, other: Any) -> bool:
    # Whether two cursors of a shard are not of the same run.
    is_same_row = shard_rows.row_of(one) == shard_rows.row_of(other)
    return bool(one and other) and is_same_row and one != other


def _checked(saved: Any, rank: int) -> dict[str, Any]:
    # The fields of a state, checked.
    what = "state of LocalBatches"
    content = dict(saved) if isinstance(saved, Mapping) else saved
    try:
        fields = checked_json.unsealed(content, what=what, version=_VERSION)
        wrong = [
            name
            for name, kind in _FIELDS.items()
            if not isinstance(fields.get(name), kind)
        ] or _invalid(fields)
        if wrong:
            raise checked_json.UnreadableError(f"has missing or invalid fields {wrong}")
    except checked_json.UnreadableError as problem:
        raise errors.DataError(
            f"the state of rank {rank} {problem}; load the result of get_state or"
            " state_dict of LocalBatches"
        ) from None
    return fields


def _invalid(fields: Mapping[str, Any]) -> list[str]:
    # The fields of the right types with invalid content.
    shards = fields["cursors"].keys()
    of_workers = [fields.get(name) for name in _OF_WORKERS if name in fields]
    progress = fields.get("progress", {"step": 0, "begun": 1})
    is_progress = isinstance(progress, dict) and progress.keys() == {"step", "begun"}
    are_numbers = all(type(each) is int and each >= 0 for each in of_workers)
    return [
        *["worker"] * (len(of_workers) not in (0, len(_OF_WORKERS)) or not are_numbers),
        *["progress"]
        * (
            not is_progress
            or not {type(progress["step"])} <= {int, type(None)}
            or type(progress["begun"]) is not int
        ),
        *["position"] * (not _is_position(fields["position"])),
        *["cursors"] * (not all(str(shard).isdecimal() for shard in shards)),
    ]


def _is_position(position: Mapping[str, Any]) -> bool:
    (value,) = position.values() if len(position) == 1 else (None,)
    if isinstance(value, list):
        periods = [each if isinstance(each, list) else [each] for each in value]
        numbers = [number for period in periods for number in period]
        return all(len(each) == 2 for each in periods) and all(map(_is_count, numbers))
    return _is_count(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
