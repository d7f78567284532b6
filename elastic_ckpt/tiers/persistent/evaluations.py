"""Metrics of evaluations, beside the steps in storage: evaluating is not saving.

    <root>/evaluations/<step>-<save>.json   of training step <step>, until it is settled
    <root>/<step>/evaluation.json           of the saved step that it counts for

An evaluation counts for the saved step of the same number, otherwise for the newest
saved step before it; of several evaluations of a saved step the nearest counts, and of
two of one training step the later. It is recorded under the number of its training
step and the save of its world, so that the line of the run (see `steps.line`)
decides whether it counts, as for a step: one of a replaced world does not.

When a step is committed, host 0 settles the records up to that step: it moves each into
the directory of its saved step, and from then on it is removed with that directory.
Killed at any point, this can be repeated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot

DIRECTORY = "evaluations"
FILE = "evaluation.json"
_VERSION = 1
_SUFFIX = ".json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation.

    Attributes:
      run: the identity of the run.
      step: the training step that was evaluated, saved or not.
      save: of the world that evaluated it, or of the saved step.
      metrics: JSON text of an object.
    """

    run: str
    step: int
    save: str
    metrics: str

    @property
    def step_id(self) -> StepId:
        """The step as that save would have it."""
        return StepId(self.step, self.save)


def record(root: PersistentRoot, evaluation: Evaluation) -> None:
    """Records an evaluation, durably.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = _path(root, evaluation.step_id)
    storage.make_directory(path.parent)
    storage.write_atomic(path, _to_bytes(evaluation))


def metrics_of(directory: epath.Path, saved: dict[str, Any] | None) -> Any:
    """The metrics of a saved step, for retention; None if there are none.

    Args:
      directory: of the step.
      saved: the metrics that it was saved with. An evaluation of the step itself
        replaces equal names; one of a later training step does not.
    """
    evaluation = _read(directory / FILE)
    if evaluation is None:
        return saved
    metrics = json.loads(evaluation.metrics)
    number = directory.name.partition("-")[0]
    if str(evaluation.step) == number:
        return {**(saved or {}), **metrics}
    return {**metrics, **(saved or {})}


def counted(root: PersistentRoot, line: Line, *, run: str) -> list[tuple[int, str]]:
    """The evaluations of a line that are there: training steps and JSON of metrics.

    Those of saved steps that were removed are gone.

    Raises:
      CheckpointError: if storage cannot be listed.
    """
    settled = [_read(root.final(step) / FILE) for step in root.steps()]
    evaluations = [
        each
        for each in [*settled, *_recorded(root)]
        if each is not None and each.run == run
    ]
    return [
        (each.step, each.metrics)
        for each in sorted(evaluations, key=lambda each: (each.step, each.save))
        if each.save <= line.save and not line.abandons(each.step_id)
    ]


def settle(root: PersistentRoot, line: Line, *, run: str) -> None:
    """Moves what was recorded into the directories of saved steps; host 0 does it.

    Args:
      root: of the steps.
      line: of the newest step that was committed.
      run: the identity of the run.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
      CheckpointError: if it cannot be listed.
    """
    recorded = [each for each in _recorded(root) if each.run == run]
    if not recorded:
        return
    steps = root.steps()
    for each in recorded:
        if each.save > line.save:
            # Another world recorded it, and has replaced this one.
            continue
        is_abandoned = line.abandons(each.step_id)
        number = None if is_abandoned else saved_step(each.step, steps)
        if number is not None and number == steps[-1] < each.step:
            # A step that is being saved may be nearer.
            continue
        if number is not None:
            _settle(root.final(number), each)
        storage.remove(_path(root, each.step_id))


def saved_step(evaluated: int, steps: Sequence[int]) -> int | None:
    """The saved step that an evaluation counts for: the newest at or before it.

    Args:
      evaluated: the training step of the evaluation.
      steps: that are saved.

    Returns:
      The step; None if it counts for none.
    """
    return max((step for step in steps if step <= evaluated), default=None)


def _settle(directory: epath.Path, evaluation: Evaluation) -> None:
    save = persistent_root.committed_save(directory)
    # A step that was saved again since is another state.
    is_same = save is None or save <= evaluation.save
    before = _read(directory / FILE)
    # The nearest counts, and of two of one training step the later.
    if is_same and (before is None or evaluation.step <= before.step):
        storage.write_atomic(directory / FILE, _to_bytes(evaluation))


def _recorded(root: PersistentRoot) -> list[Evaluation]:
    # Evaluations that are not settled, ascending by step and save.
    directory = root.path / DIRECTORY
    try:
        there = list(directory.iterdir()) if directory.exists() else []
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"the evaluations in {directory} cannot be listed ({error}); try again when"
            " the storage is back"
        ) from error
    names = [
        (parsed, each)
        for each in there
        if each.name.endswith(_SUFFIX)
        and (parsed := StepId.parse(each.name.removesuffix(_SUFFIX)))
    ]
    evaluations = [_read(path) for _, path in sorted(names, key=lambda each: each[0])]
    return [each for each in evaluations if each is not None]


def _path(root: PersistentRoot, step_id: StepId) -> epath.Path:
    return root.path / DIRECTORY / f"{step_id}{_SUFFIX}"


def _to_bytes(evaluation: Evaluation) -> bytes:
    return checked_json.to_bytes(vars(evaluation), version=_VERSION)


def _read(path: epath.Path) -> Evaluation | None:
    try:
        fields = checked_json.parse(
            path.read_bytes(), what="evaluation", version=_VERSION
        )
    except FileNotFoundError:
        return None
    except checked_json.UnreadableError as error:
        # A step whose metric is lost counts as one without; the run goes on.
        logging.warning("the evaluation %s %s; it is not counted", path, error)
        return None
    names = (field.name for field in dataclasses.fields(Evaluation))
    return Evaluation(**{name: fields[name] for name in names})
