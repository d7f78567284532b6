"""The data state: where a run stands in its data, as one small checked file.

Version 1 of `data_state.json` (a `checked_json` file) has the fields

* `engine`: the engine that wrote it, `"positional"` or `"sharded"`
* `position`: the position that all hosts share: `{"global_next_index": 960}` or
  `{"stream_row": 960}`
* `pipeline`: what decides which example comes when, named by configuration keys

It says nothing of hosts or of the batch size: both may differ at resume. The cursors of
logical shards lie beside it, see `data.cursors`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage

FILE_NAME = "data_state.json"
VERSION = 1

# The field of a pipeline that has the datasets of a mixture by name.
DATASETS = "datasets"
# The field that has the epochs until the end; 0 if there is none.
NUM_EPOCH = "num_epoch"

# Fields that list files.
_FILE_LISTS = ("files", "grain_train_files")
_MAX_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataState:
    """A position in the data of one pipeline.

    Attributes:
      engine: the engine's name.
      position: the position that all hosts share, JSON.
      pipeline: identity of the pipeline, from configuration key to JSON value.
    """

    engine: str
    position: dict[str, storage.Json]
    pipeline: dict[str, storage.Json]


def to_bytes(state: DataState) -> bytes:
    """The content of the state's file."""
    fields: dict[str, storage.Json] = {
        "engine": state.engine,
        "position": state.position,
        "pipeline": state.pipeline,
    }
    return checked_json.to_bytes(fields, version=VERSION)


def write(directory: epath.PathLike, state: DataState) -> None:
    """Writes `state` into `directory`, whole or not at all."""
    storage.write_atomic(epath.Path(directory) / FILE_NAME, to_bytes(state))


def read(directory: epath.PathLike) -> DataState:
    """The state that `write` left in `directory`, checked.

    Raises:
      DataError: as `checked_json.read` says.
    """
    path = epath.Path(directory) / FILE_NAME
    content = checked_json.read(path, what="data state", version=VERSION)
    return DataState(
        engine=content["engine"],
        position=content["position"],
        pipeline=content["pipeline"],
    )


def check_same_pipeline(
    saved: DataState, engine: str, pipeline: dict[str, storage.Json]
) -> None:
    """Raises a DataError naming each part in which `saved` is of another pipeline.

    Of a mixture, weights may differ, and datasets be new or gone; the files of a
    dataset that is in both may not. If the data ends, no dataset may be new or gone:
    shards that have ended would not read it.
    """
    before, now = dict(saved.pipeline), dict(pipeline)
    changed = []
    if saved.engine != engine:
        changed.append(f"engine: saved {_shown(saved.engine)}, now {_shown(engine)}")
    datasets: list[Any] = [of.pop(DATASETS, {}) for of in (before, now)]
    if now.get(NUM_EPOCH) and datasets[0].keys() != datasets[1].keys():
        names = [sorted(of) for of in datasets]
        changed.append(f"{DATASETS}: saved {names[0]}, now {names[1]}")
    else:
        changed += _dataset_changes(*datasets)
    changed += _changes("", before, now)
    if changed:
        raise errors.DataError(
            "the data state was saved by another pipeline (" + "; ".join(changed) + ");"
            " set these keys back, or start a new run_name"
        )


def _dataset_changes(before: Any, now: Any) -> list[str]:
    common = before.keys() & now.keys()
    if before and now and not common:
        return [f"{DATASETS}: saved {sorted(before)}, now {sorted(now)}"]
    changed: list[str] = []
    for name in sorted(common):
        own = [{**of[name], "weight": None} for of in (before, now)]
        changed += _changes(f"{DATASETS}.{name}.", *own)
    return changed


def _changes(prefix: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key in _FILE_LISTS and isinstance(old, list) and isinstance(new, list):
            changed += [
                f"{prefix}{key}: {change}" for change in _file_changes(old, new)
            ]
        else:
            changed.append(f"{prefix}{key}: saved {_shown(old)}, now {_shown(new)}")
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
    # Files of one name, from several directories, are told apart by their order.
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
