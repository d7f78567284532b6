"""Saves and restores a run's state and data state.

A step number is the number of completed training steps. A step contains the
checkpointables `state` (weights, optimizer state, step counter), `data` (the data
state), and, if the run has callbacks, `callbacks` (their states).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from absl import logging
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.checkpointer import HostsCheckpointer
from elastic_ckpt.checkpoint.components import component
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.core import bucket_clients, errors, metrics, topology
from elastic_ckpt.steps.layout import CALLBACKS, DATA, STATE
from elastic_ckpt.steps.retention import BestN
from elastic_ckpt.tiers import preserved


class Callbacks(Protocol):
    """A run's callbacks, whose states are saved as a component."""

    def get_state(self) -> Any:
        """Returns the states to save."""

    def set_state(self, state: Any) -> None:
        """Restores the states."""

    def start_over(self) -> None:
        """Resets the states, because the step has no callback states."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The steps that a run saves in addition to steps due in its tiers.

    Attributes:
      at_end: whether to save the last step.
      best: the ranking of evaluations: a step that ranks above all earlier ones is
        saved to storage. None disables this.
      in_background: whether training continues before a step is committed.
    """

    at_end: bool = True
    best: BestN | None = None
    in_background: bool = True


@dataclasses.dataclass(kw_only=True, eq=False)
class RunSaver:
    """Saves and restores a run; all hosts must make the same calls.

    Attributes:
      checkpointer: the run's checkpointer.
      saved: the steps to save in addition to steps that are due.
      data: the data iterator.
      callbacks: the run's callbacks, if any.
      last_step: the run's last step, once it is saved.
      best_step: the step whose evaluation was better than all earlier ones.
    """

    checkpointer: HostsCheckpointer
    saved: Saved
    data: ocp.StatefulCheckpointable
    callbacks: Callbacks | None = None
    last_step: int | None = None
    best_step: int | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest complete step; None before the first."""
        latest = self.checkpointer.latest
        return None if latest is None else latest.step

    def restore(
        self,
        abstract_state: Any,
        step: CheckpointMetadata | None = None,
        *,
        data: ocp.StatefulCheckpointable | None = None,
    ) -> Any:
        """Returns a step's state, and restores the data and the callbacks.

        Args:
          abstract_state: the state as a tree of shapes, dtypes and shardings.
          step: a complete step; None means the newest.
          data: the object that receives the data state; None means the data iterator.

        Raises:
          CheckpointError: if the step belongs to a different model, or no step can be
            read.
        """
        self.best_step = None
        wanted = {STATE: abstract_state, DATA: data or self.data}
        return self._load(step, wanted)[STATE]

    def _load(
        self, step: int | CheckpointMetadata | None, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        # Adds the callbacks, which older steps may lack.
        if self.callbacks is not None:
            if CALLBACKS in self.checkpointer.checkpointables_metadata(step).metadata:
                wanted[CALLBACKS] = component.Component(self.callbacks)
            else:
                self.callbacks.start_over()
        return self.checkpointer.load_checkpointables(
            step, wanted, roll_back=step is not None
        )

    def restore_data(self, step: int) -> bool:
        """Restores the data and the callbacks from `step`, but not the state.

        Returns:
          Whether the step could be read.
        """
        try:
            self._load(step, {DATA: self.data})
        except errors.CheckpointError as error:
            logging.warning("the data of step %d cannot be read: %s", step, error)
            return False
        return True

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of `step`; a step that ranks best is also saved."""
        best = self.saved.best
        before = None if best is None else self._evaluations()
        if best is not None and before is not None:
            rank, *others = map(best.rank, [metrics, *before.values()])
            if rank is not None and all(o is None or rank < o for o in others):
                self.best_step = step
        self.checkpointer.record_metrics(step, metrics)

    def start_over(self) -> None:
        """Rolls back to before the first step; `save_again` then saves step 0."""
        self.checkpointer.start_over()
        if self.callbacks is not None:
            self.callbacks.start_over()

    def save_again(self, step: int, state: Any) -> None:
        """Saves the step that the run rolled back to, to every tier, and waits.

        A restart will then continue from this step, with the current data state.

        Raises:
          CheckpointError: if the step could not be saved.
        """
        latest = self.checkpointer.latest
        assert (0 if latest is None else latest.step) == step
        self.best_step = None
        evaluated = (self._evaluations() or {}).get(step)
        before = {} if latest is None else latest.metrics or {}
        saving = self.checkpointer.save_checkpointables_async(
            step,
            self._checkpointables(state),
            force=latest is None,
            overwrite=latest is not None,
            metrics={**before, **(evaluated or {})} or None,
            custom_metadata=None if latest is None else latest.custom_metadata,
        )
        if saving is None or not saving.result():
            raise errors.CheckpointError(
                f"the run rolled back to step {step} but could not save it, so a"
                " restart would continue from a later step; find the reason in the"
                " run's `degraded` events, correct it, and restart the run"
            )
        if evaluated is not None:
            # The evaluation also applies to the new save, which has the same state.
            self.checkpointer.record_metrics(step, evaluated)
        self.checkpointer.wait()

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to save `step`, which was just computed."""
        if last and self.saved.at_end:
            return not self.checkpointer.is_durable(step)
        return self.checkpointer.should_save(step) or step == self.best_step

    def save(self, step: int, state: Any, *, last: bool) -> None:
        """Saves `state` and the data state as `step`; the last step to every tier."""
        self.last_step = step if last else None
        # A run that has ended before saves its last step again.
        overwrite = last and self.latest_step == step
        with metrics.CHECKPOINT_SAVE_BLOCK.timed():
            if step == self.best_step:
                # Otherwise a late backup could be skipped in favor of a later step's.
                self.checkpointer.wait()
            saving = self.checkpointer.save_checkpointables_async(
                step,
                self._checkpointables(state),
                force=last or step == self.best_step,
                overwrite=overwrite,
            )
            if saving is not None and not self.saved.in_background:
                saving.result()

    def _evaluations(self) -> dict[int, dict[str, Any]] | None:
        # None if there is no storage, or it is unreachable.
        try:
            return self.checkpointer.evaluations()
        except errors.CheckpointError as error:
            logging.warning("evaluations cannot be compared: %s", error)
            return None

    def close(self) -> None:
        """Waits for all tiers, including a late backup; a second call does nothing.

        If the run continues in another world, waits only for RAM.

        Raises:
          CheckpointError: if the run's last step is not in persistent storage.
        """
        last_step, self.last_step = self.last_step, None
        is_leaving_world = self.checkpointer.is_leaving_world
        close(self.checkpointer, last_step=None if is_leaving_world else last_step)

    def _checkpointables(self, state: Any) -> dict[str, Any]:
        checkpointables = {STATE: state, DATA: self.data}
        if self.callbacks is not None:
            checkpointables[CALLBACKS] = component.Component(self.callbacks)
        return checkpointables


def close(checkpointer: HostsCheckpointer, *, last_step: int | None) -> None:
    """Waits for all tiers, including a late backup, and releases the hosts.

    Args:
      checkpointer: the run's checkpointer.
      last_step: the run's last step; None if the run did not save it.

    Raises:
      CheckpointError: if the last step, or any other step that was due, is not in
        persistent storage.
    """
    with checkpointer:
        is_stored = last_step is None or checkpointer.is_durable(last_step)
        # If a step that was due is missing, leaving the block raises the cause.
    if not is_stored:
        raise errors.CheckpointError(
            f"the run's last step, {last_step}, is not in persistent storage and would"
            " be lost with the hosts; find the reason in the messages above or in the"
            " run's `degraded` events, and restart the run to save the step"
        )


def preserve_newest(checkpointer: HostsCheckpointer, *, up_to: int) -> int | None:
    """Pins the newest step in persistent storage that is not after `up_to`.

    All hosts must call this. It waits for a backup in progress, which may be of that
    step.

    Returns:
      The pinned step, on the primary host; None if no step was pinned.
    """
    stored = stored_before(checkpointer, up_to + 1)
    if stored is None or not topology.is_primary():
        return None
    try:
        preserved.pin(str(stored.path))
    except (errors.CheckpointError, *bucket_clients.failures()) as error:
        logging.error("step %d could not be pinned: %s", stored.step, error)
        return None
    return stored.step


def stored_before(
    checkpointer: HostsCheckpointer, step: int
) -> CheckpointMetadata | None:
    """The newest complete step before `step` in persistent storage."""
    checkpointer.wait()
    complete = checkpointer.checkpoints
    stored = [each for each in complete if each.path and each.step < step]
    return stored[-1] if stored else None
