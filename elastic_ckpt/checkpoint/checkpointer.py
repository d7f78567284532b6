"""The run's checkpoints, through Orbax v1's `training.Checkpointer`.

A step is a directory named by the number of steps done. It holds two checkpointables,
`state` (weights, optimizer, step counter) and `data` (the data state). Orbax writes
them under a temporary name and renames it at the end, so a step has both or does not
exist.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any, cast

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import summary, validation
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, metrics, storage

DIRECTORY = "checkpoints"
STATE = "state"
DATA = "data"

_REMEDY = (
    "restore it from a copy, or move this step out of its directory to continue from"
    " the one before"
)

# Orbax names a step that is being saved so, perhaps with more behind it.
_INTERRUPTED = re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptedStep:
    """What is left of a step that was never committed."""

    step: int
    path: str


def interrupted_steps(directory: epath.PathLike) -> list[InterruptedStep]:
    """The steps below `directory` whose saving a crash cut short, in order."""
    root = epath.Path(directory)
    if not root.exists():
        return []
    found = [(_INTERRUPTED.fullmatch(path.name), path) for path in root.iterdir()]
    steps = [
        InterruptedStep(step=int(match[1]), path=str(path))
        for match, path in found
        if match
    ]
    return sorted(steps, key=lambda step: step.step)


class RunCheckpointer:
    """Saves and restores a run; every host makes one, and the calls are collective.

    Steps that were interrupted while they were saved are reported and cleaned away.

    Args:
      directory: where the steps are.
      section: when to save and what to keep.
      data: the data iterator, an Orbax `StatefulCheckpointable`.
      emit: hears of interrupted steps and of the restore.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        section: schema.CheckpointSection,
        *,
        data: ocp.StatefulCheckpointable,
        emit: events.Emit = events.nobody,
    ) -> None:
        self._section = section
        self._data = data
        self._emit = emit
        self._pending: _PendingSave | None = None
        interrupted = interrupted_steps(directory)
        policies = ocp.training.save_decision_policies
        save = policies.AnySavePolicy(
            [
                policies.FixedIntervalPolicy(section.checkpoint_period),
                policies.PreemptionCheckpointingPolicy(),
            ]
        )
        preservation = ocp.training.preservation_policies
        newest = section.max_num_checkpoints_to_keep
        keep = preservation.LatestN(newest) if newest else preservation.PreserveAll()
        self._orbax = ocp.training.Checkpointer(
            storage.absolute(directory),
            # Orbax's policies do not match its own protocols to the letter.
            save_decision_policy=cast(Any, save),
            preservation_policy=cast(Any, keep),
            cleanup_tmp_directories=True,
        )
        for step in interrupted:
            self._emit(
                "step_interrupted",
                step=step.step,
                path=step.path,
                resume_step=self.latest_step or 0,
            )

    @property
    def latest_step(self) -> int | None:
        """The newest complete step; None before the first."""
        latest = self._orbax.latest
        return None if latest is None else latest.step

    def restore(self, abstract_state: Any) -> Any:
        """The state of the newest complete step; the data iterator goes there too.

        Args:
          abstract_state: shapes, dtypes and shardings that are wanted.

        Raises:
          CheckpointError: if the step is of another model or lacks a part.
          DataError: if its data state cannot be read or is of another pipeline.
        """
        began_secs = time.monotonic()
        latest = self._orbax.latest
        assert latest is not None
        path = str(latest.path)
        check_step(path, abstract_state)
        # The data first: it is small, and an error in it leaves nothing half loaded.
        self._load(DATA, self._data)
        state = self._load(STATE, abstract_state)
        secs = time.monotonic() - began_secs
        metrics.CHECKPOINT_LOAD.record(secs)
        self._emit("restored", step=latest.step, path=path, secs=secs)
        return state

    def _load(self, part: str, wanted: Any) -> Any:
        latest = self._orbax.latest
        assert latest is not None
        try:
            return self._orbax.load_checkpointables(latest.step, {part: wanted})[part]
        except Exception as error:
            # Orbax says of every error of a part that its handler is incompatible.
            cause = _root_cause(error)
            if isinstance(cause, errors.ElasticCkptError):
                raise cause from None
            reason = str(cause).partition("\n")[0]
            raise errors.CheckpointError(
                f"{latest.path}: its part {part!r} cannot be read"
                f" ({type(cause).__name__}: {reason}); {_REMEDY}"
            ) from cause

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether the policies want a checkpoint now that `step` steps are done."""
        if not self._orbax.is_saving_in_progress():
            self._settle()
        if last and self._section.save_checkpoint_on_completion:
            return self.latest_step != step
        return self._orbax.should_save(step)

    def save(self, step: int, state: Any, *, last: bool = False) -> None:
        """Saves `state` and the data state as `step`, perhaps in the background.

        Waits for the save before, and raises its error if it failed.

        Args:
          step: the training step.
          state: of the model.
          last: whether the run ends with it, which is all the same in one tier.

        Raises:
          CheckpointError: if Orbax declines, so that no save is skipped in silence.
        """
        del last
        with metrics.CHECKPOINT_SAVE_BLOCK.timed():
            self._settle()
            self._start_save(step, state)
            if not self._section.async_checkpointing:
                self._settle()

    def close(self) -> None:
        """Waits for a save under way, raises its error, and ends Orbax's threads."""
        try:
            self._settle()
        finally:
            self._orbax.close()

    def _start_save(self, step: int, state: Any) -> None:
        began_secs = time.monotonic()
        self._emit("save_started", step=step)
        response = self._orbax.save_checkpointables_async(
            step, {STATE: state, DATA: self._data}, force=True
        )
        if response is None:
            raise errors.CheckpointError(
                f"step {step} was not saved: Orbax declined it in"
                f" {self._orbax.directory}, whose newest step is {self.latest_step};"
                " look for steps of another run in that directory"
            )
        self._pending = _PendingSave(
            step=step, response=response, began_secs=began_secs
        )

    def _settle(self) -> None:
        # An error of a background save is raised by its response alone.
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.response.result()
        secs = time.monotonic() - pending.began_secs
        metrics.CHECKPOINT_SAVE.record(secs)
        self._emit("saved", step=pending.step, secs=secs)


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingSave:
    step: int
    response: ocp.AsyncResponse[bool]
    began_secs: float


def check_step(path: str, abstract_state: Any) -> None:
    """Raises a CheckpointError unless the step at `path` is of this run's model."""
    parts = summary.read_parts(path)
    validation.check_parts(path, set(parts), {STATE, DATA})
    if parts[STATE] is None:
        raise errors.CheckpointError(
            f"{path}: its part {STATE!r} cannot be read (what it holds is not told);"
            f" {_REMEDY}"
        )
    validation.check_same_tree(path, parts[STATE], abstract_state)
