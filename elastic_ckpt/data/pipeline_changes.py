"""Finds the differences between two pipeline descriptions, as messages.

A description is the result of `ElasticData.identity`: JSON values by key. Most values
must be equal. In a mixture (`datasets`, by name) weights may differ, and datasets may
be new or gone. A name stands for the same dataset in the whole run.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import storage
from elastic_ckpt.data import cursors

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


def between(
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
    if STAGES in before or STAGES in now:
        changed = _stage_changes(before, now, step=step, begun=begun)
    else:
        changed = _pipeline_changes(before, now)
    return changed or _reused_names(stages_of(before)[:begun], now)


def _pipeline_changes(before: Pipeline, now: Pipeline) -> list[str]:
    if before.get(NUM_SHARDS) != now.get(NUM_SHARDS):
        # The last shard has another number, so its settings cannot be compared.
        before, now = _for_first_shard(before), _for_first_shard(now)
    return _changes("", before, now, ends=bool(now.get(NUM_EPOCH)))


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


def _stage_changes(
    before: Pipeline, now: Pipeline, *, step: int | None, begun: int
) -> list[str]:
    changed = []
    begins = begins_of(before)[:begun], begins_of(now)[:begun]
    if begins[0] != begins[1]:
        changed.append(
            f"{STAGES}: those that have begun did so at steps {begins[0]}, now"
            f" {begins[1]}"
        )
    if step is not None and not changed:
        changed += late_stages(begins_of(now), step=step, begun=begun)
    pairs = zip(stages_of(before)[:begun], stages_of(now), strict=False)
    for number, (old, new) in enumerate(pairs):
        changes = _pipeline_changes(old, new)
        changed += [f"{STAGES}[{number}].{each}" for each in changes]
    return changed


def late_stages(begins: Sequence[int], *, step: int, begun: int) -> list[str]:
    """The forbidden difference if stages that have not begun should have by `step`."""
    late = [begin for begin in begins[begun:] if begin < step]
    if not late:
        return []
    return [
        f"{STAGES}: the run is at step {step}, and stages that begin at {late} are new"
    ]


def _datasets(description: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    # The datasets in a description, of all stages, each with its name: `outer/inner`
    # in a mixture inside another.
    if isinstance(description, list):
        for each in description:
            yield from _datasets(each, name)
    if not isinstance(description, dict):
        return
    for key, value in description.items():
        if key == DATASETS and isinstance(value, dict):
            for part, entry in value.items():
                path = f"{name}/{part}".lstrip("/")
                if isinstance(entry, dict):
                    yield path, entry
                    yield from _datasets(entry, path)
        elif key not in _FILE_LISTS:
            yield from _datasets(value, name)


def _reused_names(before: Sequence[Pipeline], now: Pipeline) -> list[str]:
    # A dataset would continue at the place of another that has its name.
    known: dict[str, list[Any]] = collections.defaultdict(list)
    for name, entry in _datasets(before):
        known[name].append(entry)
    changed = {}
    for name, entry in _datasets(now):
        differing = [_entry_changes("", old, entry) for old in known.get(name, ())]
        if differing and all(differing):
            changed[name] = (
                f"{DATASETS}: {name} is the name of another dataset that the run had"
                f" ({'; '.join(differing[0])}); give this one another name"
            )
    return list(changed.values())


def _renamed(before: Pipeline, now: Pipeline) -> dict[str, str]:
    # The old name of each dataset that was renamed, by its new name.
    def is_same(name: str, old: str) -> bool:
        return not _entry_changes("", before[old], now[name])

    moved = [n for n in sorted(now) if n not in before or not is_same(n, n)]
    gone = [n for n in sorted(before) if n not in now or n in moved]
    names = {}
    for name in moved:
        old = next((old for old in gone if is_same(name, old)), None)
        if old is not None:
            names[name] = old
            gone.remove(old)
    return names


def _for_first_shard(value: Any) -> Any:
    # A description with the settings of the first shard only.
    if isinstance(value, dict):
        if value.keys() == {"first", "last"}:
            return _for_first_shard(value["first"])
        return {key: _for_first_shard(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_for_first_shard(each) for each in value]
    return value


def _changes(prefix: str, before: Any, now: Any, *, ends: bool) -> list[str]:
    changed = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        lists = isinstance(old, list) and isinstance(new, list)
        if key == DATASETS:
            changed += _dataset_changes(f"{prefix}{key}", old or {}, new or {}, ends)
        elif key == STEPS and lists:
            changed += _step_changes(prefix, old, new, ends=ends)
        elif key in _FILE_LISTS and lists:
            changes = _file_changes(old, new)
            changed += [f"{prefix}{key}: {change}" for change in changes]
        else:
            changed.append(f"{prefix}{key}: saved {_shown(old)}, now {_shown(new)}")
    return changed


def of_datasets(
    before: Pipeline, now: Pipeline, *, prefix: str = DATASETS
) -> list[str]:
    """The names that stand for other files now, or that the same files had before."""
    changed = [
        f"{prefix}: {old} is now named {new}, with the same files and steps; restore"
        " its old name (a grain_train_mixture_config_path gives names)"
        for new, old in _renamed(before, now).items()
    ]
    for name in sorted(before.keys() & now.keys()):
        changed += _entry_changes(f"{prefix}.{name}.", before[name], now[name])
    return changed


def _dataset_changes(prefix: str, before: Any, now: Any, ends: bool) -> list[str]:
    changed = of_datasets(before, now, prefix=prefix)
    common = before.keys() & now.keys()
    others = before.keys() ^ now.keys()
    # Records may be read for a number of epochs inside a dataset, too.
    ends = ends or any(part.get("num_epochs") for part in cursors.parts(now))
    if not changed and others and before and now and (ends or not common):
        return [f"{prefix}: saved {sorted(before)}, now {sorted(now)}"]
    return changed


def _entry_changes(prefix: str, before: Any, now: Any) -> list[str]:
    weightless = [{**entry, "weight": None} for entry in (before, now)]
    return _changes(prefix, *weightless, ends=False)


def _step_changes(prefix: str, before: Any, now: Any, *, ends: bool) -> list[str]:
    names = [[step["name"] for step in steps] for steps in (before, now)]
    if names[0] != names[1]:
        saved, current = map(", ".join, names)
        return [f"{prefix}{STEPS}: saved {saved}, now {current}"]
    changed = []
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        name = names[0][number]
        if names[0].count(name) > 1:
            name += f" {names[0][: number + 1].count(name)}"
        changed += _changes(f"{prefix}{name}.", old, new, ends=ends)
    return changed


def _file_changes(before: list[Any], now: list[Any]) -> list[str]:
    # A file is a list that begins with name, size in bytes and number of records.
    old, new = _by_name(before), _by_name(now)
    gone = [f"{key[0]} is gone" for key in old if key not in new]
    added = [f"{key[0]} is new" for key in new if key not in old]
    altered = [
        _alteration(old[key], file)
        for key, file in new.items()
        if key in old and not _same_file(old[key], file)
    ]
    changes = gone + added + altered
    if not changes and list(old) != list(new):
        changes = ["the files are in another order"]
    more = len(changes) - _MAX_SHOWN
    return changes[:_MAX_SHOWN] + [f"and {more} more changes"] * (more > 0)


def _by_name(files: list[Any]) -> dict[tuple[str, int], Any]:
    # Files with the same name, from several directories, are numbered in their order.
    counts: collections.Counter[str] = collections.Counter()
    by_name = {}
    for file in files:
        by_name[file[0], counts[file[0]]] = file
        counts[file[0]] += 1
    return by_name


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
