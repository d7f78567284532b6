"""Stages: data whose mixture, row length or batch size changes at steps of the run.

A stage begins at a training step: that is the number of batches that the run was given,
less those that it gave up when it went back to an earlier step. Iterators count it, and
save it with the data state. `stage_shards` says what happens to examples that the steps
of a pipeline hold when a stage begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import (
    elastic_data,
    mixing,
    records,
    rows,
    shard_steps,
    sharded_data,
    stage_shards,
    state,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run, from a step on.

    Attributes:
      begin: the training step of its first batch, from 0.
      data: its data, of `ec.data.from_config` or `sharded`.
      global_batch_size: rows of a global batch; None keeps the size of the stage
        before, or that of the iterator.
    """

    begin: int
    data: sharded_data.ShardedData
    global_batch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class StagedData:
    """Elastic data of several stages; `staged` makes it.

    Attributes:
      stages: all of them, by the step at which they begin.
      number: the number of the stage of the next batches.
    """

    stages: tuple[Stage, ...]
    number: int = 0

    @property
    def current(self) -> Stage:
        """The stage of the next batches."""
        return self.stages[self.number]

    @property
    def num_shards(self) -> int:
        """S, the same in all stages."""
        return self.current.data.num_shards

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.current.data.engine

    @property
    def end(self) -> elastic_data.End:
        """How the data ends, the same in all stages."""
        return self.current.data.end

    def at(self, step: int) -> StagedData:
        """The data whose next batch is that of a step."""
        begun = sum(stage.begin <= step for stage in self.stages)
        if begun - 1 == self.number:
            return self
        return dataclasses.replace(self, number=begun - 1)

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
        """The rows of each global batch of the stage that one host loads."""
        return self.sharded().host_batches(placement)

    def sharded(self) -> sharded_data.ShardedData:
        """The data of this stage, which shards enter from the cursors of any stage."""
        make_shards = [stage.data.make_shard for stage in self.stages]
        return dataclasses.replace(
            self.current.data,
            make_shard=stage_shards.StagedShards(
                make_shards=tuple(_with_all_datasets(make_shards)), stage=self.number
            ),
        )


def staged(stages: Sequence[Stage]) -> StagedData:
    """Data that changes at steps of the run: a curriculum.

        data = ec.data.staged(
            [
                ec.data.Stage(begin=0, data=short, global_batch_size=512),
                ec.data.Stage(begin=90_000, data=long, global_batch_size=64),
            ]
        )

    Datasets continue from stage to stage where they were. Documents that rows hold when
    a stage begins come first in it, packed anew. Stages that have begun cannot be
    changed at a resume, but for weights and datasets; later ones can.

    Args:
      stages: the first begins at step 0.

    Returns:
      Data for `ec.batches` and `LocalBatches`, which begin each stage by themselves.

    Raises:
      ConfigError: if steps do not ascend from 0, or if stages do not fit together.
    """
    stages = tuple(stages)
    if not stages:
        raise errors.ConfigError("staged: there is no stage; give at least one")
    for stage in stages:
        if not isinstance(stage.data, sharded_data.ShardedData):
            raise errors.ConfigError(
                f"staged: the data of the stage that begins at step {stage.begin} is a"
                f" {type(stage.data).__name__}; give that of ec.data.sharded, or of"
                " ec.data.from_config with num_logical_shards"
            )
        for what, value in (
            ("begin", stage.begin),
            ("global_batch_size", stage.global_batch_size),
        ):
            least = int(what == "global_batch_size")
            if (value is None and least) or (type(value) is int and value >= least):
                continue
            raise errors.ConfigError(
                f"staged: a stage has {what}={value!r}; give a whole number of at least"
                f" {least}"
            )
    begins = [stage.begin for stage in stages]
    if begins[0] != 0 or sorted(set(begins)) != begins:
        raise errors.ConfigError(
            f"staged: stages begin at steps {begins}; the first begins at 0, and each"
            " one after the one before"
        )
    for what, values in (
        ("numbers of logical shards", {s.data.num_shards for s in stages}),
        ("ways to end", {s.data.end.value for s in stages}),
    ):
        if len(values) > 1:
            raise errors.ConfigError(
                f"staged: the stages have several {what}, {sorted(values)}; choose one"
                " for the whole run"
            )
    # The shares of a dataset are the same in each stage, whatever others there are.
    stages = tuple(
        dataclasses.replace(stage, data=stage.data.dealt(records.SHARES))
        for stage in stages
    )
    data = StagedData(stages=stages)
    for number in range(1, len(stages)):
        for earlier in range(number):
            _check_source(stages[earlier], stages[number])
    made = [stage.data.make_shard(0) for stage in stages]
    for number in range(1, len(stages)):
        where = f"staged: stages {number - 1} and {number}"
        stage_shards.check_steps(made[number - 1], made[number], where)
        _check_settings(data.stages, number)
    return data


def of(data: elastic_data.ElasticData) -> StagedData | None:
    """`data`, if it has stages."""
    return data if isinstance(data, StagedData) else None


def at(data: elastic_data.ElasticData, step: int) -> elastic_data.ElasticData:
    """`data` in the stage of a step."""
    of_stages = of(data)
    return data if of_stages is None else of_stages.at(step)


def size(data: elastic_data.ElasticData, base: int, *, first: int = 0) -> int:
    """The rows of a batch: those of the last stage that has a size, or `base`.

    Args:
      data: in the stage of the batch.
      base: without such a stage.
      first: the number of the first stage that counts.
    """
    of_stages = of(data)
    until_now = of_stages.stages[first : of_stages.number + 1] if of_stages else ()
    sizes = [each.global_batch_size for each in until_now]
    return next((rows for rows in reversed(sizes) if rows is not None), base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """How a run goes through its data; iterators go from each one to the next.

    Attributes:
      data: the data, in the stage that has begun.
      base_size: rows of a global batch until a stage has a size.
      size: rows of a global batch.
      progress: the step of the next batch; None without stages.
      resized_in: the number of the stage in which the batches got the size `base_size`,
        which holds until a later stage has a size; None if they never did.
    """

    data: elastic_data.ElasticData
    base_size: int
    size: int
    progress: state.Progress | None
    resized_in: int | None = None

    @classmethod
    def first(cls, data: elastic_data.ElasticData, base_size: int) -> Course:
        """That of a run at its beginning."""
        data = at(data, 0)
        return cls(
            data=data,
            base_size=base_size,
            size=size(data, base_size),
            progress=None if of(data) is None else state.Progress(step=0, begun=1),
        )

    @property
    def sizes(self) -> list[int]:
        """The rows of a global batch in each stage; without stages the present ones."""
        of_stages = of(self.data)
        if of_stages is None:
            return [self.size]
        numbers = range(len(of_stages.stages))
        each = (dataclasses.replace(of_stages, number=number) for number in numbers)
        return [self._size_in(data) for data in each]

    @property
    def stage(self) -> int:
        """The number of the stage."""
        of_stages = of(self.data)
        return 0 if of_stages is None else of_stages.number

    def due(self) -> Course:
        """That in the stage of the next step: this one, unless another stage begins.

        Raises:
          DataError: if there are stages and the step is not known.
        """
        of_stages = of(self.data)
        if of_stages is None or len(of_stages.stages) == 1:
            return self
        if self.progress is None or self.progress.step is None:
            raise errors.DataError(
                "the data state was saved without stages, so that it does not say at"
                " which step it was; call begin_at(step) of the iterator after you have"
                " loaded it"
            )
        data = of_stages.at(self.progress.step)
        if data is self.data:
            return self
        return dataclasses.replace(
            self,
            data=data,
            size=self._size_in(data),
            progress=dataclasses.replace(
                self.progress, begun=max(self.progress.begun, data.number + 1)
            ),
        )

    def next(self) -> Course:
        """That after the next batch."""
        if self.progress is None or self.progress.step is None:
            return self
        progress = dataclasses.replace(self.progress, step=self.progress.step + 1)
        return self.with_progress(progress)

    def with_progress(self, progress: state.Progress | None) -> Course:
        """That with another step, in the same stage."""
        return dataclasses.replace(self, progress=progress)

    def at_step(self, step: int) -> Course:
        """That of a run whose next batch is that of `step`.

        Raises:
          DataError: if a state did not say its step, and a stage that is new would have
            begun before.
        """
        of_stages = of(self.data)
        if of_stages is None:
            return self
        begins = [stage.begin for stage in of_stages.stages]
        before = sum(begin < step for begin in begins)
        begun = self.progress.begun if self.progress else 1
        if self.progress is not None and self.progress.step is None:
            state.check_unchanged(state.late_stages(begins, step=step, begun=begun))
        return self.with_progress(state.Progress(step=step, begun=max(begun, before)))

    def resized(self, global_batch_size: int) -> Course:
        """That with batches of another size, until a stage begins that has a size."""
        return dataclasses.replace(
            self,
            base_size=global_batch_size,
            size=global_batch_size,
            resized_in=self.stage,
        )

    def _size_in(self, data: elastic_data.ElasticData) -> int:
        of_stages = of(data)
        if self.resized_in is None or of_stages is None:
            return size(data, self.base_size)
        is_later = of_stages.number >= self.resized_in
        first = self.resized_in + 1 if is_later else 0
        return size(data, self.base_size, first=first)

    def restored(self, saved: state.DataState) -> Course:
        """That of a run that continues from a saved state."""
        # Its stage begins, even if it is the one in which this run is.
        data = at(self.data, 0)
        restored = dataclasses.replace(
            self,
            data=data,
            size=self._size_in(data),
            progress=self._progress_of(saved),
        )
        is_known = restored.progress is not None and restored.progress.step is not None
        return restored.due() if is_known else restored

    def gone_back(self, to: state.DataState | None) -> Course:
        """That of a run that repeats the steps since a state with other rows.

        Without a state they are those since the beginning.
        """
        first = Course.first(self.data, self.base_size).progress
        progress = first if to is None else self._progress_of(to)
        if self.progress is not None and progress is not None:
            # What has begun has begun: shards have cursors of it.
            begun = max(progress.begun, self.progress.begun)
            progress = dataclasses.replace(progress, begun=begun)
        return self.with_progress(progress)

    def _progress_of(self, saved: state.DataState) -> state.Progress | None:
        # Without stages a state says nothing of the step, unless it is the first.
        if of(self.data) is None:
            return None
        if saved.progress is not None:
            return saved.progress
        return state.Progress(step=None if saved.row else 0, begun=1)


# What may differ between the stages of a configuration.
_CHANGING = (
    state.DATASETS,
    "max_target_length",
    "use_truncation",
    "grain_packing_type",
    "grain_shuffle_buffer_size",
    "max_segments_per_seq",
    state.STEPS,
)


def _check_settings(stages: tuple[Stage, ...], number: int) -> None:
    # Raises a ConfigError if documents would differ in a way that no stage can have.
    one, two = (
        {
            key: value
            for key, value in stage.data.identity().items()
            if key not in _CHANGING
        }
        for stage in (stages[0], stages[number])
    )
    changed = state.pipeline_changes(one, two)
    if changed:
        raise errors.ConfigError(
            f"staged: the stage that begins at step {stages[number].begin} has other"
            f" documents than the first ({'; '.join(changed)}); stages may change"
            " datasets, weights, lengths, packing and batch sizes"
        )


def _check_source(one: Stage, other: Stage) -> None:
    # Raises a ConfigError if the cursor of one pipeline would be taken for a place in
    # other files than it was of.
    steps = f"the stages that begin at steps {one.begin} and {other.begin}"
    both = [one.data, other.data]
    if all(isinstance(data.make_shard, sharded_data.Configured) for data in both):
        _check_names(steps, *(data.identity() for data in both))
        return
    begins = [shard_steps.chain(data.make_shard(0))[0] for data in both]
    descriptions = [shard_steps.description(begin) for begin in begins]
    if all(isinstance(begin, mixing.Mixture) for begin in begins):
        _check_names(steps, *descriptions)
        return
    is_ours = isinstance(begins[0], shard_steps.Step)
    alike = is_ours or shard_steps.are_alike(*begins)
    if not alike or descriptions[0] != descriptions[1]:
        raise errors.ConfigError(
            f"staged: {steps} begin with other records; mix them by ec.data.Mixture,"
            " in every stage, with weights from 0"
        )


def _check_names(steps: str, *descriptions: Mapping[str, Any]) -> None:
    changed = state.dataset_changes(*([each] for each in descriptions))
    if changed:
        raise errors.ConfigError(
            f"staged: {steps} name their datasets differently ({'; '.join(changed)});"
            " give the same files the same name in all stages, and other files another"
        )


def _with_all_datasets(make_shards: Sequence[Any]) -> list[Any]:
    # A stage knows the datasets of others, of which it may have to read some again.
    if not all(isinstance(each, sharded_data.Configured) for each in make_shards):
        return list(make_shards)
    return [each.with_datasets_of(make_shards) for each in make_shards]
