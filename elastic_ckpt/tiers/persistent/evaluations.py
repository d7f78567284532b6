"""Metrics of evaluations, beside the steps in storage: evaluating is not saving.

    <root>/evaluations/<step>-<save>.json   of training step <step>, saved or not

An evaluation counts for the saved step of the same number, otherwise for the newest
saved step before it (`steps.retention.with_evaluations`). It is recorded under the
number of its training step and the save of its world, so that the line of the run (see
`steps.step`) decides whether it counts, as for a step: one of a replaced world does
not. It is removed with its saved step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from absl import logging
from etils import epath

from elastic_ckpt.core import checked_json, codec, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot

DIRECTORY = "evaluations"
_VERSION = 1


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
    content = checked_json.to_bytes(vars(evaluation), version=_VERSION)
    storage.write_atomic(path, content)


def counted(root: PersistentRoot, line: Line, *, run: str) -> list[tuple[int, str]]:
    """The evaluations of a line that are there: training steps and JSON of metrics.

    Of two of one training step the later save counts, and comes last.

    Raises:
      CheckpointError: if storage is out of reach.
    """
    return [
        (each.step, each.metrics)
        for each in _recorded(root)
        if each.run == run
        and each.save <= line.save
        and not line.abandons(each.step_id)
    ]


def forget(root: PersistentRoot, steps: Collection[int], line: Line) -> None:
    """Removes the evaluations of saved steps, and those that the line has passed.

    Args:
      root: of the steps; they are still there.
      steps: that are about to be removed.
      line: of the world that removes them.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
      CheckpointError: if it cannot be listed.
    """
    saved = root.steps()
    for each in _recorded(root):
        counts_for = max((step for step in saved if step <= each.step), default=None)
        is_passed = line.abandons(each.step_id) and each.step <= max(saved)
        if each.save <= line.save and (is_passed or counts_for in steps):
            storage.remove(_path(root, each.step_id))


def _recorded(root: PersistentRoot) -> list[Evaluation]:
    # Ascending by step and save.
    directory = root.path / DIRECTORY
    with records.within_reach(directory):
        names = storage.names(directory) if directory.exists() else []
        ids = (StepId.parse(name.removesuffix(".json")) for name in names)
        found = [_read(_path(root, each)) for each in sorted(filter(None, ids))]
    return [each for each in found if each is not None]


def _path(root: PersistentRoot, step_id: StepId) -> epath.Path:
    return root.path / DIRECTORY / f"{step_id}.json"


def _read(path: epath.Path) -> Evaluation | None:
    try:
        content = path.read_bytes()
        fields = checked_json.parse(content, what="evaluation", version=_VERSION)
        return codec.decode(Evaluation, fields)
    except FileNotFoundError:
        return None
    except ValueError as error:
        # A step whose metric is lost counts as one without; the run goes on.
        logging.warning("the evaluation %s %s; it is not counted", path, error)
        return None
