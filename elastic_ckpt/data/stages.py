"""Stages: data whose mixture, row length or batch size changes at given steps.

A stage begins after a number of training steps. Iterators count steps, roll the count
back with the run, and save it with the data state.

Each stage has its own pipelines. A shard enters the next stage from its cursor:
documents that the old rows still hold come first in the new rows, so each document is
trained on once, on any number of hosts. Pipelines without `lm.Rows` have the same steps
in all stages, so one cursor works for all of them.

The cursor of a stage after the first is `{"stage": n, "of": state}`. A carried-over
document has the place `{HELD: {"stage": m, "cursor": cursor in stage m}, "taken": k,
"parent": state}`. To load this place, the old rows are reopened at that cursor and k of
their documents are skipped; the stage's own documents follow from `parent`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    mixing,
    records,
    rows,
    shard_steps,
    sharded_data,
    state,
)
from elastic_ckpt.data.lm import rows as lm_rows

# Fields of cursors.
_STAGE, _OF = "stage", "of"
_TAKEN, _PARENT, _CURSOR = "taken", "parent", "cursor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The data of a run from a training step on.

    Attributes:
      begin: the number of training steps before it, which is the saved step that it
        continues from: 0 for the first stage.
      data: the result of `ec.data.from_config` or `sharded`.
      global_batch_size: the number of rows in a global batch; None keeps the size of
        the previous stage, or of the iterator.
    """

    begin: int
    data: sharded_data.ShardedData
    global_batch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class StagedData:
    """Elastic data with stages; `staged` creates it.

    Attributes:
      stages: all stages, ordered by the step at which they begin.
      number: the index of the current stage.
    """

    stages: tuple[Stage, ...]
    number: int = 0

    @property
    def current(self) -> Stage:
        """The stage of the next batch."""
        return self.stages[self.number]

    @property
    def num_shards(self) -> int:
        """S, the same in all stages."""
        return self.current.data.num_shards

    @property
    def engine(self) -> str:
        """The engine name."""
        return self.current.data.engine

    @property
    def end(self) -> elastic_data.End:
        """How the data ends, the same in all stages."""
        return self.current.data.end

    def at(self, step: int) -> StagedData:
        """The same data in the stage of `step`."""
        number = sum(stage.begin <= step for stage in self.stages) - 1
        if number == self.number:
            return self
        return dataclasses.replace(self, number=number)

    def identity(self) -> dict[str, storage.Json]:
        """The settings of each stage that determine the order of examples."""
        settings = [stage.data.identity() for stage in self.stages]
        return {
            state.NUM_SHARDS: self.num_shards,
            state.BEGINS: [stage.begin for stage in self.stages],
            state.STAGES: [
                {key: value for key, value in each.items() if key != state.NUM_SHARDS}
                for each in settings
            ],
        }

    def host_batches(self, placement: rows.Placement) -> elastic_data.HostBatches:
        """The rows of each global batch that one host loads, in this stage."""
        return self.sharded().host_batches(placement)

    def sharded(self) -> sharded_data.ShardedData:
        """The data of this stage; its shards can start at a cursor of any stage."""
        make_shards = tuple(stage.data.make_shard for stage in self.stages)
        return dataclasses.replace(
            self.current.data,
            make_shard=StagedShards(make_shards=make_shards, stage=self.number),
        )


def staged(stages: Sequence[Stage]) -> StagedData:
    """A curriculum: data that changes at given steps of the run.

        data = ec.data.staged(
            [
                ec.data.Stage(begin=0, data=short, global_batch_size=512),
                ec.data.Stage(begin=90_000, data=long, global_batch_size=64),
            ]
        )

    When a stage begins, each dataset continues where it was, and documents that are
    still buffered are repacked and come first. When you resume, stages that have begun
    may change only weights and datasets; later stages may change freely.

    Args:
      stages: the stages in order; the first has `begin=0`.

    Returns:
      Data for `ec.batches` and `LocalBatches`, which switch stages by themselves.

    Raises:
      ConfigError: if steps do not ascend from 0, or if stages are incompatible.
    """
    stages = tuple(stages)
    if not stages:
        raise errors.ConfigError("staged: the list of stages is empty; pass at least 1")
    for stage in stages:
        if not isinstance(stage.data, sharded_data.ShardedData):
            raise errors.ConfigError(
                f"staged: the data of the stage with begin={stage.begin} is"
                f" of type {type(stage.data).__name__}; pass the result of"
                " ec.data.sharded, or of ec.data.from_config with num_logical_shards"
            )
    begins = [stage.begin for stage in stages]
    if begins[0] != 0 or sorted(set(begins)) != begins:
        raise errors.ConfigError(
            f"staged: stages begin after {begins} training steps; the first stage must"
            " begin after 0, and each later stage after more than the previous one"
        )
    sizes = [stage.global_batch_size for stage in stages]
    if any(size is not None and size < 1 for size in sizes):
        raise errors.ConfigError(
            f"staged: stages have global_batch_size {sizes}; set each to 1 or more, or"
            " to None to keep the previous size"
        )
    for what, values in (
        ("numbers of logical shards", {s.data.num_shards for s in stages}),
        ("values of end", {s.data.end.value for s in stages}),
    ):
        if len(values) > 1:
            raise errors.ConfigError(
                f"staged: the stages have different {what}, {sorted(values)}; choose"
                " one value for the whole run"
            )
    # The shares of a dataset must not depend on a stage's other datasets.
    stages = tuple(
        dataclasses.replace(stage, data=stage.data.dealt(records.SHARES))
        for stage in stages
    )
    for number in range(1, len(stages)):
        _check_fits(stages[number], stages[:number])
    return StagedData(stages=stages)


def at(data: elastic_data.ElasticData, step: int) -> elastic_data.ElasticData:
    """Returns `data`, in the stage of `step` if it has stages."""
    return data.at(step) if isinstance(data, StagedData) else data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """The stage, step and batch size of a run; iterators replace it as they advance.

    Attributes:
      data: the data in the current stage.
      base_size: the number of rows in a global batch until a stage sets its own size.
      progress: the number of training steps so far; None if there are no stages.
      resized_in: the stage in which `resized` set `base_size`, which then applies until
        a later stage sets its own size; None if batches were never resized.
    """

    data: elastic_data.ElasticData
    base_size: int
    progress: state.Progress | None = None
    resized_in: int | None = None

    @classmethod
    def first(cls, data: elastic_data.ElasticData, base_size: int) -> Course:
        """The course of a new run."""
        has_stages = isinstance(data, StagedData)
        progress = state.Progress(step=0, begun=1) if has_stages else None
        return cls(data=at(data, 0), base_size=base_size, progress=progress)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages; empty if there are none."""
        return self.data.stages if isinstance(self.data, StagedData) else ()

    @property
    def stage(self) -> int:
        """The index of the current stage; 0 if there are no stages."""
        return self.data.number if isinstance(self.data, StagedData) else 0

    @property
    def step(self) -> int | None:
        """The number of steps so far; None if unknown, or if there are no stages."""
        return None if self.progress is None else self.progress.step

    @property
    def size(self) -> int:
        """The number of rows in a global batch."""
        return self.sizes[self.stage]

    @property
    def sizes(self) -> list[int]:
        """The global batch size in each stage; without stages, the current size."""
        found, size = [], self.base_size
        own = [stage.global_batch_size for stage in self.stages] or [None]
        for number, of_stage in enumerate(own):
            is_resized = number == self.resized_in
            size = self.base_size if is_resized else of_stage or size
            found.append(size)
        return found

    def due(self) -> Course:
        """The course for the next step; `self` unless a stage begins there.

        Raises:
          DataError: if there are stages and the step is unknown.
        """
        if len(self.stages) < 2:
            return self
        if self.progress is None or self.progress.step is None:
            raise errors.DataError(
                "the data state was saved without stages, so it does not record its"
                " step; call the iterator's begin_at(step) after loading the state"
            )
        data = at(self.data, self.progress.step)
        if data is self.data:
            return self
        due = dataclasses.replace(self, data=data)
        return due._with_begun(due.stage + 1)

    def next(self) -> Course:
        """The course after the next batch."""
        if self.progress is None or self.progress.step is None:
            return self
        progress = dataclasses.replace(self.progress, step=self.progress.step + 1)
        return self.with_progress(progress)

    def with_progress(self, progress: state.Progress | None) -> Course:
        """This course at a different step in the same stage."""
        return dataclasses.replace(self, progress=progress)

    def _with_begun(self, begun: int) -> Course:
        # At least `begun` stages have begun.
        if self.progress is None:
            return self
        begun = max(self.progress.begun, begun)
        return self.with_progress(dataclasses.replace(self.progress, begun=begun))

    def at_step(self, step: int) -> Course:
        """The course of a run that continues with the batch of `step`.

        Raises:
          DataError: if the loaded state had no step, and a new stage would have begun
            before `step`.
        """
        if self.progress is None:
            return self
        begins, begun = [stage.begin for stage in self.stages], self.progress.begun
        if self.progress.step is None:
            state.check_unchanged(state.late_stages(begins, step=step, begun=begun))
        course = self.with_progress(state.Progress(step=step, begun=begun))
        return course._with_begun(sum(begin < step for begin in begins))

    def resized(self, global_batch_size: int) -> Course:
        """This course with a new batch size, until a stage sets its own."""
        return dataclasses.replace(
            self, base_size=global_batch_size, resized_in=self.stage
        )

    def restored(self, saved: state.DataState) -> Course:
        """The course of a run that continues from a saved state."""
        # The state's stage begins again, even if the run is already in it.
        begun = dataclasses.replace(
            self, data=at(self.data, 0), progress=self._progress_of(saved)
        )
        return begun if begun.step is None else begun.due()

    def gone_back(self, to: state.DataState | None) -> Course:
        """The course of a run that repeats the steps since `to` with new rows.

        Args:
          to: the saved state to roll back to; None for the beginning.
        """
        first = Course.first(self.data, self.base_size).progress
        gone = self.with_progress(first if to is None else self._progress_of(to))
        # Shards keep the cursors of stages that had begun.
        return gone._with_begun(self.progress.begun if self.progress else 1)

    def _progress_of(self, saved: state.DataState) -> state.Progress | None:
        if not self.stages or saved.progress is not None:
            return saved.progress
        # A state without stages does not record its step, but the first step is known.
        return state.Progress(step=None if saved.row else 0, begun=1)


# Keys that may differ between the stages of a configuration.
_CHANGING = (
    state.DATASETS,
    "max_target_length",
    "use_truncation",
    "grain_packing_type",
    "grain_shuffle_buffer_size",
    "max_segments_per_seq",
    state.STEPS,
)


def _check_fits(stage: Stage, before: Sequence[Stage]) -> None:
    where = f"staged: the stage that begins after {stage.begin} steps"
    *identities, now = (each.data.identity() for each in (*before, stage))
    changed = state.dataset_changes(identities, [now])
    if changed:
        raise errors.ConfigError(
            f"{where} names its datasets differently ({'; '.join(changed)}); in all"
            " stages, use the same name for the same files, and different names for"
            " different files"
        )
    changed = state.pipeline_changes(*map(_fixed, (identities[0], now)))
    if changed:
        raise errors.ConfigError(
            f"{where} creates documents differently from the first stage"
            f" ({'; '.join(changed)}); stages may change only datasets, weights,"
            " lengths, packing and batch sizes"
        )
    first, steps = (_split(each.data.make_shard(0)) for each in (before[0], stage))
    for _, rows_on in (first, steps):
        if not all(map(shard_steps.holds_nothing, rows_on[1:])):
            raise errors.ConfigError(
                f"{where} or the first stage has steps after ec.data.lm.Rows that may"
                " buffer rows; there, use only functions that process one row at a time"
            )
    is_same = len(first[0]) == len(steps[0]) and all(
        map(_same_step, first[0], steps[0])
    )
    if bool(first[1]) != bool(steps[1]) or not is_same:
        raise errors.ConfigError(
            f"{where} reads different records than the first stage, or has different"
            " pipeline steps before it builds rows; in every stage, mix the same"
            " records with ec.data.Mixture (weights may be 0), and build rows with"
            " ec.data.lm.Rows"
        )


def _fixed(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity.items() if key not in _CHANGING}


def _split(made: grain.IterDataset) -> tuple[list[Any], list[Any]]:
    # The steps of a pipeline before its rows, and those from its rows on.
    steps = [s for s in shard_steps.chain(made) if not shard_steps.passes_on(s)]
    before = list(itertools.takewhile(lambda s: not isinstance(s, lm_rows.Rows), steps))
    return before, steps[len(before) :]


def _same_step(one: Any, other: Any) -> bool:
    # Whether two steps have the same states. A mixture has its states by dataset name.
    if type(one) is not type(other) or isinstance(one, mixing.Mixture):
        return type(one) is type(other)
    if isinstance(one, shard_steps.Step) or shard_steps.holds_nothing(one):
        return shard_steps.description(one) == shard_steps.description(other)
    return shard_steps.are_alike(one, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedShards:
    """The `make_shard` of one stage, given every stage's `make_shard`.

    Attributes:
      make_shards: the `make_shard` of each stage.
      stage: the index of the stage.
    """

    make_shards: tuple[shard_steps.MakeShard, ...]
    stage: int

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of a shard; they can start at a cursor of any stage."""
        return _StagedRows(self, shard)

    def opened(self, made: Any, shard: int) -> grain.DatasetIterator:
        """Opens a pipeline so that its rows accept documents of any stage."""
        opened = iter(made)
        of_rows = _rows_of(opened)
        if of_rows is not None:
            of_rows.documents = _Continued(of_rows.documents, self, shard)
        return opened


def _rows_of(opened: Any) -> lm_rows.RowsIterator | None:
    # The iterator of `lm.Rows` in a pipeline, if it has one.
    steps = reversed(shard_steps.chain(opened))
    return next((s for s in steps if isinstance(s, lm_rows.RowsIterator)), None)


class _StagedRows(grain.IterDataset):
    passes_on = holds_nothing = True

    def __init__(self, staged: StagedShards, shard: int) -> None:
        self.staged, self.shard = staged, shard
        super().__init__(staged.make_shards[staged.stage](shard))

    def __iter__(self) -> grain.DatasetIterator:
        opened = self.staged.opened(self._parent, self.shard)
        return _StagedRowsIterator(self.staged, self.shard, opened)


class _StagedRowsIterator(grain.DatasetIterator):
    """The rows of a shard, from a state of any stage.

    From a state of an earlier stage, the iterator yields that stage's rows until
    `renew` begins its own stage with the documents that are not in a row yet.
    """

    def __init__(
        self, staged: StagedShards, shard: int, own: grain.DatasetIterator
    ) -> None:
        super().__init__(own)
        self._staged, self._shard, self._stage = staged, shard, staged.stage
        self._own = self._made = own
        if isinstance(own, lm_rows.RowsIterator):
            self.unmade, self.made = own.unmade, own.made

    def __next__(self) -> Any:
        return next(self._made)

    def get_state(self) -> Any:
        state = self._made.get_state()
        # The first stage has the states of a run without stages.
        return {_STAGE: self._stage, _OF: state} if self._stage else state

    def set_state(self, state: Any) -> None:
        stage = 0
        if isinstance(state, dict) and state.keys() == {_STAGE, _OF}:
            stage, state = state[_STAGE], state[_OF]
        if stage >= len(self._staged.make_shards):
            raise errors.DataError(
                f"a logical shard is in stage {stage}, counted from 0, but the data has"
                f" only {len(self._staged.make_shards)} stages; declare all stages that"
                " have begun"
            )
        self._made, self._stage = self._own, self._staged.stage
        if stage != self._stage and _rows_of(self._own) is not None:
            made = self._staged.make_shards[stage](self._shard)
            self._made, self._stage = self._staged.opened(made, self._shard), stage
        self._made.set_state(state)

    def renew(self) -> bool:
        """See `mixing.renew`; also begins the stage."""
        if self._made is not self._own:
            held = {_STAGE: self._stage, _CURSOR: self._made.get_state()}
            self._made.close()
            self._made, self._stage = self._own, self._staged.stage
            self._own.set_state(lm_rows.begin_from({cursors.HELD: held, _TAKEN: 0}))
        return mixing.renew(self._own)


class _Continued(shard_steps.Elements):
    """A stage's documents, after any that an earlier stage still held."""

    def __init__(
        self, documents: grain.DatasetIterator, staged: StagedShards, shard: int
    ) -> None:
        super().__init__(documents)
        self._documents, self._staged, self._shard = documents, staged, shard
        self._held: list[Any] = []
        self._taken = 0

    def some(self, at_most: int) -> list[Any]:
        found, self._held = self._held[:at_most], self._held[at_most:]
        self._taken += len(found)
        return found or shard_steps.take(self._documents, at_most)

    def get_state(self) -> Any:
        if self._held:
            place = {cursors.HELD: self._origin, _TAKEN: self._taken}
            return place | {_PARENT: self._documents.get_state()}
        return self._documents.get_state()

    def set_state(self, state: Any) -> None:
        self._held = []
        if not (isinstance(state, dict) and cursors.HELD in state):
            self._documents.set_state(state)
            return
        self._origin, self._taken = state[cursors.HELD], state[_TAKEN]
        made = self._staged.make_shards[self._origin[_STAGE]](self._shard)
        old = _rows_of(self._staged.opened(made, self._shard))
        assert old is not None
        old.set_state(self._origin[_CURSOR])
        before = old.documents
        assert isinstance(before, _Continued)
        # The old stage may not have read all documents carried over to it.
        self._held = (old.rest() + before._held)[self._taken :]
        self._documents.set_state(state.get(_PARENT, before._documents.get_state()))
        old.close()
