"""The steps of a run in persistent storage: their arrays and their data state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint import foreign_steps, run_saver
from elastic_ckpt.core import digest, errors
from elastic_ckpt.data import cursors, mixing, records, state
from elastic_ckpt.inspect import run_files
from elastic_ckpt.inspect.survey import UncommittedStep
from elastic_ckpt.tiers.persistent import persistent_root

# The parts of a step as MaxText names them.
_ITEMS = "items"
_ITERATOR = "iter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedData(state.DataState):
    """The data state of a step.

    Attributes:
      taken: documents taken of each dataset of a mixture.
      skipped: corrupt records that were skipped.
    """

    taken: Mapping[str, int]
    skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnreadableData:
    """Stands in place of a data state that cannot be read.

    Attributes:
      error: why.
    """

    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step in storage.

    Attributes:
      step: its number.
      num_bytes: of its arrays.
      state: its arrays.
      data: its data state.
    """

    step: int
    num_bytes: int
    state: tuple[foreign_steps.LeafSummary, ...]
    data: SavedData | UnreadableData


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredSteps:
    """The steps of a run in storage.

    Attributes:
      run: the directory of the run.
      config: the digest of its configuration.
      known: the numbers of the steps in storage, ascending.
      steps: those that were looked at.
      interrupted: steps that were interrupted while they were saved.
    """

    run: str = ""
    config: str = ""
    known: tuple[int, ...] = ()
    steps: tuple[SavedStep, ...] = ()
    interrupted: tuple[UncommittedStep, ...] = ()


def collect(
    directory: str, *, step: int | None = None, newest_only: bool = False
) -> StoredSteps:
    """The steps of the run in `directory`.

    Args:
      directory: of the run.
      step: the only one to look at, if it exists; None for all.
      newest_only: whether to look only at the newest.

    Raises:
      RunError: if there is no run in `directory`.
    """
    record = run_files.read(directory)
    complete = foreign_steps.steps(record.steps_directory)
    shown = [each for each in complete if step in (None, each)]
    root = persistent_root.PersistentRoot.from_path(record.steps_directory)
    return StoredSteps(
        run=directory,
        config=digest.json_digest(record.settings),
        known=tuple(complete),
        steps=tuple(
            _step(each, complete[each]) for each in shown[-1 if newest_only else 0 :]
        ),
        interrupted=tuple(
            UncommittedStep(step=each.step, path=str(each.path))
            for each in root.leftovers()
        ),
    )


def _step(step: int, path: epath.Path) -> SavedStep:
    is_of_maxtext = (path / _ITEMS).exists()
    leaves = foreign_steps.arrays(path, _ITEMS if is_of_maxtext else run_saver.STATE)
    return SavedStep(
        step=step,
        num_bytes=sum(leaf.num_bytes for leaf in leaves),
        state=tuple(leaves),
        data=data_of(path),
    )


def data_of(path: epath.Path) -> SavedData | UnreadableData:
    """The data state of the step at `path`, also one that no run can go on from."""
    is_of_maxtext = (path / _ITEMS).exists()
    try:
        directory = path / (_ITERATOR if is_of_maxtext else run_saver.DATA)
        saved = state.read(directory)
        num_shards: Any = saved.pipeline.get("num_logical_shards", 0)
        shards = cursors.read(directory, range(num_shards), saved.position)
    except errors.DataError as error:
        return UnreadableData(error=str(error))
    return SavedData(
        engine=saved.engine,
        position=saved.position,
        pipeline=saved.pipeline_now,
        left_out=saved.left_out,
        progress=saved.progress,
        taken=mixing.taken(shards.values()),
        skipped=records.skipped(shards.values()),
    )


def describe(stored: StoredSteps, *, known: str, is_brief: bool = False) -> str:
    """The steps as text.

    Args:
      stored: from `collect`.
      known: the numbers of all, in words.
      is_brief: whether arrays are counted rather than listed.
    """
    lines = [
        f"{stored.run}: {known}",
        f"configuration: digest {stored.config[:12]}",
    ]
    before: SavedStep | None = None
    for each in stored.steps:
        lines.append(
            f"step {each.step}: {len(each.state):,} arrays, {each.num_bytes:,} bytes"
        )
        if is_brief:
            pass
        elif before is not None and each.state == before.state:
            lines.append(f"  state: as in step {before.step}")
        else:
            lines += [
                f"  {leaf.path:<40} {leaf.dtype}{list(leaf.shape)}"
                f"  {leaf.num_bytes:,} bytes  {leaf.sharding}"
                for leaf in each.state
            ]
        lines += _data_lines(each.data, is_brief=is_brief)
        before = each
    lines += [
        f"step {each.step} was interrupted while it was saved: {each.path}"
        for each in stored.interrupted
    ]
    return "\n".join(lines)


def _data_lines(data: SavedData | UnreadableData, *, is_brief: bool) -> list[str]:
    if isinstance(data, UnreadableData):
        return [f"  data: {data.error}"]
    pipeline: Mapping[str, Any] = data.pipeline
    where, stage = "", pipeline.get("stage")
    if stage is not None:
        number, begins = stage["number"], stage["begin_steps"]
        where = f", stage {number + 1} of {len(begins)}, from step {begins[number]}"
    position = json.dumps(data.position)
    lines = [f"  data: {data.engine}, position {position}{where}"]
    for key, value in {} if is_brief else pipeline.items():
        if key not in ("datasets", "stage"):
            lines.append(f"    {key}: {json.dumps(value)}")
    datasets = pipeline.get("datasets", {})
    weights = sum(each["weight"] for each in datasets.values()) or 1
    all_taken = sum(data.taken.values()) or 1
    for name, dataset in datasets.items():
        taken, achieved = data.taken.get(name), ""
        if taken is not None:
            achieved = f", {taken:,} documents taken so far, {taken / all_taken:.2%}"
        lines.append(
            f"    dataset {name}: weight {dataset['weight'] / weights:.2%}{achieved},"
            f" {len(dataset['files'])} files"
        )
    if data.skipped:
        lines.append(f"    corrupt records skipped: {data.skipped:,}")
    return lines
