"""Saves and restores the state and the data state of a run.

A step is named by the number of steps done. It holds two checkpointables, `state`
(weights, optimizer, step counter) and `data` (the data state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import configured_tiers
from elastic_ckpt.checkpoint.checkpointer import Checkpointer
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, metrics
from elastic_ckpt.manifests import layout

# The directory of the steps in that of a run.
DIRECTORY = layout.STEPS
STATE = "state"
DATA = "data"


class RunSaver:
    """Saves and restores a run; every host makes one, and all call it alike.

    Args:
      checkpointer: over the tiers.
      section: whether to save in the background, and at the end.
      data: the data iterator.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        section: schema.CheckpointSection,
        *,
        data: ocp.StatefulCheckpointable,
    ) -> None:
        self._checkpointer = checkpointer
        self._section = section
        self._data = data
        # The step that ends the run, once it is saved.
        self._last_step: int | None = None
        # The step whose evaluation was better than all before.
        self._best_step: int | None = None
        self._is_closed = False

    def claim_world(self) -> int:
        """See `Checkpointer.claim_world`."""
        return self._checkpointer.claim_world()

    @property
    def latest_step(self) -> int | None:
        """The newest complete step; None before the first."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def restore(self, abstract_state: Any) -> Any:
        """Returns the newest state, and sets the data iterator to its position.

        Raises:
          CheckpointError: if the step is of another model, or none can be read.
        """
        wanted = {STATE: abstract_state, DATA: self._data}
        return self._checkpointer.load_checkpointables(None, wanted)[STATE]

    def restore_data(self, step: int) -> bool:
        """Sets the data iterator alone to its position at `step`.

        Returns:
          Whether it could be read.
        """
        try:
            self._checkpointer.load_checkpointables(step, {DATA: self._data})
        except errors.CheckpointError as error:
            logging.warning("the data of step %d cannot be read: %s", step, error)
            return False
        return True

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of an evaluation of `step`, which may also be saved."""
        if self._section.save_best_checkpoint and self._is_best(metrics):
            self._best_step = step
        self._checkpointer.record_metrics(step, metrics)

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to save `step`, which has just been computed."""
        if last and self._section.save_checkpoint_on_completion:
            return not self._checkpointer.is_durable(step)
        return self._checkpointer.should_save(step) or step == self._best_step

    def save(self, step: int, state: Any, *, last: bool) -> None:
        """Saves `state` and the data state as `step`; the last one to every tier."""
        self._last_step = step if last else None
        # A run that had already ended saves its last step again.
        overwrite = last and self.latest_step == step
        force = last or step == self._best_step
        with metrics.CHECKPOINT_SAVE_BLOCK.timed():
            saving = self._checkpointer.save_checkpointables_async(
                step,
                {STATE: state, DATA: self._data},
                force=force,
                overwrite=overwrite,
            )
            if saving is not None and not self._section.async_checkpointing:
                saving.result()

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        policy = configured_tiers.best_steps(self._section)
        rank = policy.rank(metrics)
        try:
            before = self._checkpointer.evaluations().values()
        except errors.CheckpointError as error:
            logging.warning("evaluations cannot be compared: %s", error)
            return False
        ranks = [each for each in map(policy.rank, before) if each is not None]
        return rank is not None and all(rank < each for each in ranks)

    def close(self) -> None:
        """Waits for all tiers, a late backup too; a second call does nothing.

        If the run goes on in another world, it waits for RAM alone.

        Raises:
          CheckpointError: if the step that ends the run is not in persistent storage.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_left = self._checkpointer.is_left
        close(self._checkpointer, last_step=None if is_left else self._last_step)

    def abandon(self) -> None:
        """Releases the hosts after an error, and does not wait for saves."""
        self._is_closed = True
        self._checkpointer.abandon()


def close(checkpointer: Checkpointer, *, last_step: int | None) -> None:
    """Waits for all tiers, a late backup too, and releases the hosts.

    Args:
      checkpointer: that the run has saved to.
      last_step: the step that ends the run; None if the run did not save it.

    Raises:
      CheckpointError: if that step is not in persistent storage.
    """
    with checkpointer:
        if last_step is not None and not checkpointer.is_durable(last_step):
            raise errors.CheckpointError(
                f"step {last_step}, the last of the run, is not in persistent storage,"
                " and would be lost with the hosts: see why in the lines before or"
                " `degraded` in the run's events, make room or bring the storage"
                " back, and start the run once more to save it"
            )
