"""The data state: the position of a run in its data, in one small checked file.

Version 1 of `data_state.json` (a `checked_json` file) has the fields

* `engine`: the engine that wrote it, `"positional"` or `"sharded"`
* `position`: the position that all hosts share: `{"global_next_index": 960}` or
  `{"stream_row": 960}`
* `pipeline`: the settings that determine the order of examples, by configuration key

It contains neither the number of hosts nor the batch size: both may differ at resume.
The cursors of logical shards are in files beside it, see `data.cursors`.
"""

from __future__ import annotations

import dataclasses

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import pipeline_changes

FILE_NAME = "data_state.json"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataState:
    """A position in the data of one pipeline.

    Attributes:
      engine: the engine's name.
      position: the position that all hosts share, JSON.
      pipeline: the identity of the pipeline, from configuration key to JSON value.
    """

    engine: str
    position: dict[str, storage.Json]
    pipeline: dict[str, storage.Json]


def to_bytes(state: DataState) -> bytes:
    """The content of the state's file."""
    return checked_json.to_bytes(vars(state), version=VERSION)


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
    )


def check_same_pipeline(
    saved: DataState, engine: str, pipeline: dict[str, storage.Json]
) -> None:
    """Raises a DataError with each difference if `saved` is of another pipeline.

    `pipeline_changes.between` defines which parts may differ.
    """
    changed = pipeline_changes.between(saved.pipeline, pipeline)
    if saved.engine != engine:
        changed.insert(0, f'engine: saved "{saved.engine}", now "{engine}"')
    if changed:
        raise errors.DataError(
            "the data state was saved by another pipeline (" + "; ".join(changed) + ");"
            " set this back, or start a new run"
        )
