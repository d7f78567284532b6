"""What differs between two descriptions of a pipeline, in words.

A description is what `ElasticData.identity` gives: JSON values by key. Most have to be
equal. Of a mixture (`datasets`, by name) weights may differ, and datasets be new or
gone; of files, a state of an older program has less to compare with.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core import storage

# The field that has the datasets of a mixture by name.
DATASETS = "datasets"
# The field that has the epochs until the end; 0 if there is none.
NUM_EPOCH = "num_epoch"
# The field that has the steps of a pipeline, first to last.
STEPS = "steps"
# The field that has the name which the user gave to a pipeline.
_NAME = "pipeline"
_NUM_SHARDS = "num_logical_shards"

# Fields that list files.
_FILE_LISTS = ("files", "grain_train_files")
_MAX_SHOWN = 5

Pipeline = Mapping[str, Any]


def between(before: Pipeline, now: Pipeline) -> list[str]:
    """Each part in which the pipeline `now` may not differ from `before`, but does.

    If the data ends, no dataset may be new or gone: shards that have ended would not
    read it.
    """
    before, now = dict(before), dict(now)
    if STEPS not in before:
        # Older programs saved the name alone, and none if the user gave none.
        now.pop(STEPS, None)
        if not before.get(_NAME):
            for description in (before, now):
                description.pop(_NAME, None)
    elif before.get(_NUM_SHARDS) != now.get(_NUM_SHARDS):
        # The last shard is another one.
        before, now = _of_first_shard(before), _of_first_shard(now)
    return _changes("", before, now, ends=bool(now.get(NUM_EPOCH)))


def kept_names(before: Pipeline, now: Pipeline) -> dict[str, str]:
    """The names with which datasets go on that have other names than before.

    A dataset is recognised by its files. One that is new gets another name if its own
    belonged to a dataset that goes on.

    Returns:
      for each name of today that has to change, the one to use.
    """
    names = _renamed(before, now)
    kept = set(names.values())
    for name in sorted(kept & now.keys() - names.keys()):
        free = (f"{name}#{number}" for number in itertools.count(2))
        names[name] = next(n for n in free if n not in before and n not in now)
    return names


def _renamed(before: Pipeline, now: Pipeline) -> dict[str, str]:
    # For each dataset that has another name than before, the one before.
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


def _of_first_shard(described: Any) -> Any:
    if isinstance(described, dict):
        if described.keys() == {"first", "last"}:
            return _of_first_shard(described["first"])
        return {key: _of_first_shard(value) for key, value in described.items()}
    if isinstance(described, list):
        return [_of_first_shard(value) for value in described]
    return described


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


def _dataset_changes(prefix: str, before: Any, now: Any, ends: bool) -> list[str]:
    common = before.keys() & now.keys()
    others = before.keys() ^ now.keys()
    if others and before and now and (ends or _ends(now) or not common):
        return [f"{prefix}: saved {sorted(before)}, now {sorted(now)}"]
    changed = [
        f"{prefix}: {old} has the name {new} now, with the same files and steps; give"
        " it its old name"
        for new, old in _renamed(before, now).items()
    ]
    for name in sorted(common):
        changed += _entry_changes(f"{prefix}.{name}.", before[name], now[name])
    return changed


def _entry_changes(prefix: str, before: Any, now: Any) -> list[str]:
    weightless = [{**entry, "weight": None} for entry in (before, now)]
    return _changes(prefix, *weightless, ends=False)


def _ends(described: Any) -> bool:
    # Whether records are read for a number of epochs.
    if isinstance(described, dict):
        return bool(described.get("num_epochs")) or any(map(_ends, described.values()))
    return isinstance(described, list) and any(map(_ends, described))


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
    # Files are lists that begin with a name, a size in bytes and a number of records.
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
    return changes[:_MAX_SHOWN] + [f"and {more} changes more"] * (more > 0)


def _by_name(files: list[Any]) -> dict[tuple[str, int], Any]:
    # Files of one name, from several directories, are distinguished by their order.
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for file in files:
        found[file[0], counts[file[0]]] = file
        counts[file[0]] += 1
    return found


def _same_file(old: list[Any], new: list[Any]) -> bool:
    # States of older programs have no sample of the content.
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
