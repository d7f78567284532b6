"""The data state: the position of a run in its data, in one small checked file.

Version 1 of `data_state.json` (a `checked_json` file) has the fields

* `engine`: the engine that wrote it, `"positional"` or `"sharded"`
* `position`: the position that all hosts share: `{"global_next_index": 960}`, or
  `{"batches": [[96, 8], [48, 4]]}`, the batches so far: the rows of each, and how many
* `pipeline`: the settings that determine the order of examples, by configuration key
* `left_out`, if there are any: the ranges of positions, `[start, stop]`, that the run
  has left out
* `progress`, of data with stages: the training step of the next batch, and the number
  of stages that have begun, `{"step": 20, "begun": 2}`

It does not contain the number of hosts. That and the batch size may differ at resume.
The cursors of logical shards are in files beside it, see `data.cursors`.

`pipeline` is the result of `ElasticData.identity`: JSON values by key. At a resume they
must be equal, except that in a mixture (`datasets`, by name) weights may differ, and
datasets may be new or gone. A name stands for the same dataset in the whole run.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import cursors, rows

FILE_NAME = "data_state.json"
VERSION = 1

# The field with the datasets of a mixture by name.
DATASETS = "datasets"
# The field with the number of epochs until the end; 0 never ends.
NUM_EPOCH = "num_epoch"
# The field with the steps of a pipeline, first to last.
STEPS = "steps"
# The field with the stages of a run, and that of a stage with its first step.
STAGES = "stages"
BEGIN = "begin"
# The field with the number of logical shards, of all stages.
NUM_SHARDS = "num_logical_shards"

# Fields that list files.
_FILE_LISTS = ("files", "grain_train_files")
_MAX_SHOWN = 5

Pipeline = Mapping[str, Any]
Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run of stages is.

    Attributes:
      step: the training step of the next batch; None if it is not known.
      begun: the number of stages of which shards may have cursors.
    """

    step: int | None
    begun: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataState:
    """A position in the data of one pipeline.

    Attributes:
      engine: the engine's name.
      position: the position that all hosts share, JSON.
      pipeline: the identity of the pipeline, from configuration key to JSON value.
      left_out: the positions before `position` whose rows were not trained on, because
        the run went back and continued after them: starts and stops, ascending.
      progress: of data with stages; otherwise None.
    """

    engine: str
    position: dict[str, storage.Json]
    pipeline: dict[str, storage.Json]
    left_out: Ranges = ()
    progress: Progress | None = None

    @property
    def row(self) -> int:
        """The number of rows before the position."""
        return row_of(self.position)

    @property
    def pipeline_now(self) -> dict[str, storage.Json]:
        """The identity of the pipeline of the next batch, in the stage of its step."""
        step = 0 if self.progress is None else self.progress.step or 0
        begins = begins_of(self.pipeline)
        number = max(n for n, begin in enumerate(begins) if begin <= step)
        now = stages_of(self.pipeline)[number]
        if STAGES in self.pipeline:
            now["stage"] = {"number": number, "begin_steps": list(begins)}
        return now


def to_bytes(state: DataState) -> bytes:
    """The content of the state's file."""
    fields: dict[str, storage.Json] = {
        "engine": state.engine,
        "position": state.position,
        "pipeline": state.pipeline,
    }
    if state.left_out:
        fields["left_out"] = [list(each) for each in state.left_out]
    if state.progress is not None:
        fields["progress"] = dict(vars(state.progress))
    return checked_json.to_bytes(fields, version=VERSION)


def write(directory: epath.PathLike, state: DataState) -> None:
    """Writes `state` into `directory`, whole or not at all."""
    storage.write_atomic(epath.Path(directory) / FILE_NAME, to_bytes(state))


def read(directory: epath.PathLike) -> DataState:
    """Reads and checks the state that `write` wrote into `directory`.

    Raises:
      DataError: as in `checked_json.read`.
    """
    path = epath.Path(directory) / FILE_NAME
    content = checked_json.read(path, what="data state", version=VERSION)
    return DataState(
        engine=content["engine"],
        position=content["position"],
        pipeline=content["pipeline"],
        left_out=tuple((start, stop) for start, stop in content.get("left_out", ())),
        progress=progress_of(content),
    )


def progress_of(fields: Mapping[str, Any]) -> Progress | None:
    """The progress in the fields of a state, if they have it."""
    return Progress(**fields["progress"]) if "progress" in fields else None


def row_of(position: cursors.Position) -> int:
    """The number of rows before a position."""
    if "batches" in position:
        return rows.num_rows(history_of(position))
    (row,) = position.values()
    assert isinstance(row, int)
    return row


def history_of(position: Mapping[str, Any]) -> rows.History:
    """The batches before a position of data with logical shards."""
    return tuple((size, number) for size, number in position["batches"])


def position_of(history: rows.History) -> cursors.Position:
    """The inverse of `history_of`."""
    return {"batches": [list(period) for period in history]}


def check_same_pipeline(
    saved: DataState, engine: str, pipeline: dict[str, storage.Json]
) -> None:
    """Raises a DataError with each difference if `saved` is of another pipeline.

    `pipeline_changes` defines which parts may differ.
    """
    # Without stages the run is in its first.
    step, begun = None, 1
    if saved.progress is not None:
        step, begun = saved.progress.step, saved.progress.begun
    changed = pipeline_changes(saved.pipeline, pipeline, step=step, begun=begun)
    if saved.engine != engine:
        changed.insert(0, f'engine: saved "{saved.engine}", now "{engine}"')
    check_unchanged(changed)


def check_unchanged(changed: Sequence[str]) -> None:
    """Raises a DataError with the differences of two pipelines, if there are any."""
    if changed:
        grown = any(change.endswith(" is new") for change in changed)
        route = (
            "; to add files to a run, keep those of before as a dataset of the same"
            " name, and make the new ones another (a grain_train_mixture_config_path"
            " gives names)"
        )
        raise errors.DataError(
            "the data state was saved by another pipeline (" + "; ".join(changed) + ");"
            " set this back, or start a new run" + route * grown
        )


def pipeline_changes(
    before: Pipeline, now: Pipeline, *, step: int | None = None, begun: int = 1
) -> list[str]:
    """The forbidden differences between the pipelines `before` and `now`.

    If the data is finite, no dataset may be new or gone: shards that have ended would
    not read it. Stages that have begun have to be as they were.

    Args:
      before: of the saved state.
      now: of the data that is to continue.
      step: of the saved state, if it says.
      begun: how many of its stages had begun.
    """
    changed = []
    begins = begins_of(before)[:begun], begins_of(now)
    if begins[0] != begins[1][:begun]:
        changed.append(
            f"{STAGES}: those that have begun did so at steps {begins[0]}, now"
            f" {begins[1][:begun]}"
        )
    elif step is not None:
        changed += late_stages(begins[1], step=step, begun=begun)
    stages = stages_of(before)[:begun], stages_of(now)
    for number, (old, new) in enumerate(zip(*stages, strict=False)):
        prefix = f"{STAGES}[{number}]." if STAGES in now else ""
        changed += _changes(prefix, _own(old), _own(new))
        changed += _other_datasets(prefix, old, new)
    return changed + dataset_changes(*stages)


def stages_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The descriptions of the stages of a run; without stages it has one."""
    stages = pipeline.get(STAGES)
    if stages is None:
        return [dict(pipeline)]
    shared = {key: value for key, value in pipeline.items() if key != STAGES}
    return [
        shared | {key: value for key, value in stage.items() if key != BEGIN}
        for stage in stages
    ]


def begins_of(pipeline: Pipeline) -> list[int]:
    """The step at which each stage begins."""
    return [stage[BEGIN] for stage in pipeline.get(STAGES, [{BEGIN: 0}])]


def late_stages(begins: Sequence[int], *, step: int, begun: int) -> list[str]:
    """The forbidden difference if stages that have not begun should have by `step`."""
    late = [begin for begin in begins[begun:] if begin < step]
    if not late:
        return []
    return [
        f"{STAGES}: the run is at step {step}, and stages that begin at {late} are new"
    ]


def dataset_changes(before: Iterable[Pipeline], now: Iterable[Pipeline]) -> list[str]:
    """The datasets that are others now than those of their names before.

    A dataset would continue at the place of another that has its name, and under
    another name it would begin anew.
    """
    known: dict[str, list[Any]] = collections.defaultdict(list)
    for name, entry in itertools.chain.from_iterable(map(_datasets, before)):
        known[name].append(entry)
    entries = dict(itertools.chain.from_iterable(map(_datasets, now)))
    changes = {
        name: [
            _changes(f"{DATASETS}.{name}.", _own(old), _own(entry))
            for old in known[name]
        ]
        for name, entry in entries.items()
        if name in known
    }
    others = sorted(name for name in known if all(changes.get(name, ())))
    changed = []
    for name, entry in entries.items():
        if name in known and name not in others:
            continue
        weight = {"weight": entry["weight"]}
        named = [old for old in others if entry in [o | weight for o in known[old]]]
        if named:
            changed.append(
                f"{DATASETS}: {named[0]} is now named {name}, with the same files and"
                " steps; restore its old name (a grain_train_mixture_config_path gives"
                " names)"
            )
        elif name in known:
            changed += changes[name][0]
    return changed


def _datasets(description: Pipeline, outer: str = "") -> Iterator[tuple[str, Any]]:
    # The datasets in a description, each with its name: `outer/inner` in a mixture
    # inside another.
    for part in (description, *description.get(STEPS, ())):
        for name, entry in part.get(DATASETS, {}).items():
            yield f"{outer}{name}", entry
            yield from _datasets(entry, f"{outer}{name}/")


def _other_datasets(prefix: str, before: Pipeline, now: Pipeline) -> list[str]:
    # The forbidden difference if datasets are new or gone that may not be.
    old, new = (dict(_datasets(each)) for each in (before, now))
    # Records may be read for a number of epochs inside a dataset, too.
    steps = [step for entry in new.values() for step in entry.get(STEPS, ())]
    ends = now.get(NUM_EPOCH) or any(step.get("num_epochs") for step in steps)
    if not old or not new or (old.keys() & new.keys() and not ends):
        return []
    if old.keys() == new.keys():
        return []
    return [f"{prefix}{DATASETS}: saved {sorted(old)}, now {sorted(new)}"]


def _own(description: Pipeline) -> dict[str, Any]:
    # The settings that must be equal, without those of datasets in it.
    apart = (DATASETS, "weight")
    return {key: each for key, each in description.items() if key not in apart}


def _changes(prefix: str, before: Pipeline, now: Pipeline) -> list[str]:
    changed = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        lists = isinstance(old, list) and isinstance(new, list)
        if key == STEPS and lists:
            changed += _step_changes(prefix, old, new)
        elif key in _FILE_LISTS and lists:
            changed += [f"{prefix}{key}: {each}" for each in _file_changes(old, new)]
        elif isinstance(old, dict) and isinstance(new, dict):
            changed += _changes(f"{prefix}{key}.", old, new)
        else:
            changed.append(f"{prefix}{key}: saved {_shown(old)}, now {_shown(new)}")
    return changed


def _step_changes(prefix: str, before: Any, now: Any) -> list[str]:
    names = [[step["name"] for step in steps] for steps in (before, now)]
    if names[0] != names[1]:
        saved, current = map(", ".join, names)
        return [f"{prefix}{STEPS}: saved {saved}, now {current}"]
    changed = []
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        name = names[0][number]
        if names[0].count(name) > 1:
            name += f" {names[0][: number + 1].count(name)}"
        changed += _changes(f"{prefix}{name}.", _own(old), _own(new))
    return changed


def _file_changes(before: list[Any], now: list[Any]) -> list[str]:
    # A file is a list that begins with name, size in bytes and number of records.
    names = [[file[0] for file in files] for files in (before, now)]
    old, new = map(collections.Counter, names)
    changes = [f"{name} is gone" for name in (old - new).elements()]
    changes += [f"{name} is new" for name in (new - old).elements()]
    if not changes and names[0] != names[1]:
        changes = ["the files are in another order"]
    if not changes:
        pairs = zip(before, now, strict=True)
        changes = [_alteration(*pair) for pair in pairs if not _same_file(*pair)]
    more = len(changes) - _MAX_SHOWN
    return changes[:_MAX_SHOWN] + [f"and {more} more changes"] * (more > 0)


def _same_file(old: list[Any], new: list[Any]) -> bool:
    # Runs that skip corrupt records save no digest of the content.
    return all(a == b for a, b in zip(old, new, strict=False))


def _alteration(old: list[Any], new: list[Any]) -> str:
    if old[1:3] == new[1:3]:
        return f"{new[0]} has other content of the same size"
    return (
        f"{new[0]} had {old[1]} bytes and {old[2]} records, now {new[1]} and {new[2]}"
    )


def _shown(value: storage.Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
