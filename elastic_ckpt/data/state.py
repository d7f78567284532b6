"""The data state: a run's position in its data, in one small checked file.

`FORMAT.md` describes `data_state.json`, a `checked_json` file with the fields of
`DataState`. The cursors of logical shards are in separate files; see `data.cursors`.
Loops without JAX have both in one JSON object (`to_json`).

When a run resumes, the number of hosts and the batch size may differ. `pipeline`, the
result of `ElasticData.identity`, must be the same, except that a mixture (`datasets`,
keyed by name) may have different weights and gain or lose datasets. A name refers to
the same dataset throughout a run.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import cursors, rows

FILE_NAME = "data_state.json"
# The kind of content, in error messages.
_WHAT = "data state"

# Fields of `pipeline`. A mixture's datasets, keyed by name:
DATASETS = "datasets"
# The number of epochs; 0 repeats endlessly.
NUM_EPOCH = "num_epoch"
# The steps of a pipeline, first to last.
STEPS = "steps"
# The stages of a run, and the number of training steps before each.
STAGES = "stages"
BEGINS = "begin_steps"
# The number of logical shards, the same in all stages.
NUM_SHARDS = "num_logical_shards"

_MAX_SHOWN = 5

Pipeline = Mapping[str, Any]
StateDict = dict[str, storage.Json]
Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run with stages has progressed.

    Attributes:
      step: the number of training steps so far; None if unknown.
      begun: the number of stages in which shards may have cursors.
    """

    step: int | None
    begun: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataState:
    """A position in a pipeline's data.

    Attributes:
      engine: the engine's name.
      position: the position, the same on all hosts: `{"global_next_index": 960}`, or
        the sizes and counts of the batches so far, `{"batches": [[96, 8], [48, 4]]}`.
      pipeline: the pipeline's identity: values, keyed by configuration key.
      left_out: the ranges before `position` that were not trained on, because the run
        rolled back and continued after them: starts and stops, in ascending order.
      progress: the progress of data with stages; None if there are no stages.
    """

    engine: str
    position: dict[str, storage.Json]
    pipeline: dict[str, Any]
    left_out: Ranges = ()
    progress: Progress | None = None

    @property
    def row(self) -> int:
        """The number of rows before the position."""
        return row_of(self.position)

    @property
    def pipeline_now(self) -> dict[str, storage.Json]:
        """The identity of the pipeline in the current stage."""
        step = self.progress.step if self.progress else None
        begins = begins_of(self.pipeline)
        number = bisect.bisect_right(begins, step or 0) - 1
        stage = {"stage": {"number": number, BEGINS: begins}}
        now = stages_of(self.pipeline)[number]
        return now | stage if BEGINS in self.pipeline else now


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderState(DataState):
    """A data state of a loader without JAX, with its cursors.

    Attributes:
      at_end: whether the loader had delivered all batches of finite data.
      cursors: the cursors of the shards that the loader runs.
    """

    at_end: bool
    cursors: cursors.Cursors


def write(directory: epath.PathLike, state: DataState) -> None:
    """Writes `state` into `directory` atomically."""
    content = checked_json.to_bytes(to_fields(state), version=cursors.VERSION)
    storage.write_atomic(epath.Path(directory) / FILE_NAME, content)


def read(directory: epath.PathLike) -> DataState:
    """Reads and checks the state in `directory`.

    Raises:
      DataError: see `checked_json.read`.
    """
    path = epath.Path(directory) / FILE_NAME
    return _of_fields(checked_json.read(path, what=_WHAT, version=cursors.VERSION))


def to_fields(state: DataState) -> StateDict:
    """The fields of a state as JSON, without its cursors."""
    fields = {name: each for name, each in vars(state).items() if name != "cursors"}
    progress = state.progress and dict(vars(state.progress))
    return fields | {"left_out": [*map(list, state.left_out)], "progress": progress}


def to_json(state: LoaderState) -> StateDict:
    """A state and its cursors as one part."""
    part = cursors.to_part(state.cursors, state.position)
    return checked_json.sealed(to_fields(state) | part, version=cursors.VERSION)


def of_parts(parts: Mapping[str, Any]) -> LoaderState:
    """Joins the parts of a state, keyed by name: JSON objects, or texts of them.

    Raises:
      DataError: if a part is invalid or was altered, or if parts are missing or from
        different steps; see `cursors.joined`.
    """
    checked: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        try:
            checked[name] = (
                checked_json.parse(part.encode(), what=_WHAT, version=cursors.VERSION)
                if isinstance(part, str)
                else checked_json.unsealed(part, what=_WHAT, version=cursors.VERSION)
            )
        except checked_json.UnreadableError as problem:
            raise errors.DataError(
                f"{name} {problem}; load a state that LocalBatches, TorchLoader or"
                " ShardedState returned, with all of its parts"
            ) from None
    fields = cursors.joined(checked)
    if "pipeline" not in fields:
        raise errors.DataError(
            f"the state lacks the part with its pipeline; it has only {[*checked]};"
            " load all of its parts together"
        )
    more = {"at_end": fields["at_end"], "cursors": fields[cursors.CURSORS]}
    return LoaderState(**vars(_of_fields(fields)), **more)


def _of_fields(fields: Mapping[str, Any]) -> DataState:
    progress = fields["progress"]
    return DataState(
        engine=fields["engine"],
        position=fields["position"],
        pipeline=fields["pipeline"],
        left_out=tuple((start, stop) for start, stop in fields["left_out"]),
        progress=None if progress is None else Progress(**progress),
    )


def row_of(position: Mapping[str, Any]) -> int:
    """The number of rows before a position."""
    if "batches" in position:
        return rows.num_rows(history_of(position))
    (row,) = position.values()
    return row


def history_of(position: Mapping[str, Any]) -> rows.History:
    """The batches before a position in data with logical shards."""
    return tuple((size, number) for size, number in position["batches"])


def position_of(history: rows.History) -> cursors.Position:
    """The inverse of `history_of`."""
    return {"batches": [list(period) for period in history]}


def check_same_pipeline(
    saved: DataState, engine: str, pipeline: dict[str, storage.Json]
) -> None:
    """Raises a DataError that lists how the pipeline differs from the saved one.

    `pipeline_changes` defines which parts may differ.
    """
    # Data without stages has one stage.
    progress = saved.progress or Progress(step=None, begun=1)
    changed = pipeline_changes(
        {"engine": saved.engine, **saved.pipeline},
        {"engine": engine, **pipeline},
        **vars(progress),
    )
    check_unchanged(changed)


def check_unchanged(changed: Sequence[str]) -> None:
    """Raises a DataError that lists the differences between pipelines, if any."""
    if changed:
        grown = any(change.endswith(" is new") for change in changed)
        route = (
            "new files can join an endless run as a second dataset: keep the old files"
            " as a dataset with the same name (set the names with"
            " grain_train_mixture_config_path); otherwise, "
        )
        raise errors.DataError(
            "the data state was saved by a different pipeline ("
            + "; ".join(changed)
            + "); "
            + route * grown
            + "change the pipeline back, or start a new run"
        )


def pipeline_changes(
    before: Pipeline, now: Pipeline, *, step: int | None = None, begun: int = 1
) -> list[str]:
    """The forbidden differences between the pipelines `before` and `now`.

    Finite data must keep its datasets: shards that have ended would not read a new one.
    Stages that have begun must not change.

    Args:
      before: the pipeline of the saved state.
      now: the pipeline of the run that loads it.
      step: the step of the saved state, if known.
      begun: the number of stages that had begun in the saved state.
    """
    begins = begins_of(before)[:begun], begins_of(now)
    changed = late_stages(begins[1], step=step or 0, begun=begun)
    if begins[0] != begins[1][:begun]:
        changed = [
            f"{STAGES}: began at steps {begins[0]}, now begin at {begins[1][:begun]}"
        ]
    stages = stages_of(before)[:begun], stages_of(now)
    for number, (old, new) in enumerate(zip(*stages, strict=False)):
        prefix = f"{STAGES}[{number}]." if STAGES in now else ""
        changed += _changes(prefix, old, new) + _other_datasets(prefix, old, new)
    return changed + dataset_changes(*stages)


def stages_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The description of each stage; data without stages has one stage."""
    apart = (STAGES, BEGINS)
    shared = {key: value for key, value in pipeline.items() if key not in apart}
    return [shared | stage for stage in pipeline.get(STAGES, [{}])]


def begins_of(pipeline: Pipeline) -> list[int]:
    """The number of training steps before each stage."""
    return pipeline.get(BEGINS, [0])


def late_stages(begins: Sequence[int], *, step: int, begun: int) -> list[str]:
    """The forbidden difference if a new stage would begin before `step`."""
    late = [begin for begin in begins[begun:] if begin < step]
    if not late:
        return []
    return [
        f"{STAGES}: the run is at step {step}, but new stages begin earlier, at {late}"
    ]


def dataset_changes(before: Iterable[Pipeline], now: Iterable[Pipeline]) -> list[str]:
    """The datasets that were renamed, or replaced under the same name.

    Under another dataset's name, a dataset would continue at the wrong place; under a
    new name, it would start over.
    """
    old, new = (
        dict(itertools.chain.from_iterable(map(_datasets, each)))
        for each in (before, now)
    )
    changes = {
        name: _changes(f"{DATASETS}.{name}.", old[name], new[name])
        for name in new.keys() & old.keys()
    }
    # Names under which no dataset continues.
    free = [name for name in old if changes.get(name, True)]
    changed = []
    for name in sorted(new):
        if name in old and name not in free:
            continue
        entry = new[name] | {"weight": None}
        named = [each for each in free if old[each] | {"weight": None} == entry]
        if named:
            changed.append(
                f"{DATASETS}: {named[0]} is now named {name}, with the same files and"
                " steps; restore its old name (set the names with"
                " grain_train_mixture_config_path)"
            )
        else:
            changed += changes.get(name, [])
    return changed


def _datasets(description: Pipeline, outer: str = "") -> Iterator[tuple[str, Any]]:
    # The datasets in a description, keyed by name: `outer/inner` in a nested mixture.
    for each in (description, *description.get(STEPS, ())):
        for name, entry in each.get(DATASETS, {}).items():
            yield f"{outer}{name}", entry
            yield from _datasets(entry, f"{outer}{name}/")


def _other_datasets(prefix: str, before: Pipeline, now: Pipeline) -> list[str]:
    old, new = (dict(_datasets(each)) for each in (before, now))
    # A dataset may limit the epochs of its own records.
    steps = [step for entry in new.values() for step in entry.get(STEPS, ())]
    ends = now.get(NUM_EPOCH) or any(step.get("num_epochs") for step in steps)
    may_differ = not old or not new or (old.keys() & new.keys() and not ends)
    if may_differ or old.keys() == new.keys():
        return []
    return [f"{prefix}{DATASETS}: saved {sorted(old)}, now {sorted(new)}"]


def _changes(prefix: str, before: Pipeline, now: Pipeline) -> list[str]:
    # The settings that differ, except for settings of datasets.
    changed = []
    old, new = dict(_settings(before)), dict(_settings(now))
    for key in old | new:
        saved, present = old.get(key), new.get(key)
        if _are_files(saved) and _are_files(present):
            changed += [f"{prefix}{key}: {e}" for e in _file_changes(saved, present)]
        elif saved != present:
            values = map(json.dumps, (saved, present))
            changed.append(
                "{}{}: saved {:.120}, now {:.120}".format(prefix, key, *values)
            )
    return changed


def _settings(description: Pipeline) -> Iterator[tuple[str, Any]]:
    # The settings by name. A step's settings are prefixed by its name: `Rows.length`.
    for key, value in description.items():
        if key == STEPS:
            names = [step["name"] for step in value]
            yield key, names
            for number, step in enumerate(value):
                so_far = names[:number].count(names[number])
                name = names[number] + (f" {so_far + 1}" if so_far else "")
                for setting, each in _settings(step):
                    yield f"{name}.{setting}", each
        elif key not in (DATASETS, "weight"):
            yield from _leaves(key, value)


def _leaves(name: str, value: storage.Json) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each)
    else:
        yield name, value


def _are_files(value: Any) -> TypeGuard[list[Any]]:
    # A file is a list: name, size in bytes, number of records, digests.
    return isinstance(value, list) and all(
        isinstance(each, list) and [*map(type, each[:4])] == [str, int, int, str]
        for each in value
    )


def _file_changes(before: list[Any], now: list[Any]) -> list[str]:
    # Runs that skip corrupt records have no digest of the content.
    old, new = ([file[0] for file in files] for files in (before, now))
    gone, added = (
        (collections.Counter(one) - collections.Counter(other)).elements()
        for one, other in ((old, new), (new, old))
    )
    changes = [f"{name} is gone" for name in gone]
    changes += [f"{name} is new" for name in added]
    if not changes and old != new:
        changes = ["the files are in a different order"]
    elif not changes:
        changes = [
            f"{one[0]} had {one[1]} bytes and {one[2]} records, now has {two[1]} and"
            f" {two[2]}, with different content"
            for one, two in zip(before, now, strict=True)
            if any(map(operator.ne, one, two))
        ]
    more = len(changes) - _MAX_SHOWN
    return changes[:_MAX_SHOWN] + [f"and {more} more changes"] * (more > 0)
