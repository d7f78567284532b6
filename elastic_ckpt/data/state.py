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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import cursors, pipeline_changes, rows

FILE_NAME = "data_state.json"
VERSION = 1

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
        begins = pipeline_changes.begins_of(self.pipeline)
        number = max(n for n, begin in enumerate(begins) if begin <= step)
        now = pipeline_changes.stages_of(self.pipeline)[number]
        if pipeline_changes.STAGES in self.pipeline:
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

    `pipeline_changes.between` defines which parts may differ.
    """
    # Without stages the run is in its first.
    step, begun = None, 1
    if saved.progress is not None:
        step, begun = saved.progress.step, saved.progress.begun
    changed = pipeline_changes.between(saved.pipeline, pipeline, step=step, begun=begun)
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
