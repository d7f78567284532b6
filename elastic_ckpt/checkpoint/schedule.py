"""When to save: at which steps the local and the persistent tier are due."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import clock, preemption
from elastic_ckpt.tiers.choices import Chosen

# The maximum number of steps between comparisons of the clock.
_MOST_STEPS = 16


class BackupClock:
    """Decides when a backup is due by time.

    Args:
      every_minutes: the time between backups, in minutes; None if backups are not due
        by time.
      since_secs: the time since the last backup, in seconds; an earlier world may have
        made that backup.
    """

    def __init__(
        self, every_minutes: float | None = None, *, since_secs: float = 0.0
    ) -> None:
        self.every_secs = math.inf if every_minutes is None else 60 * every_minutes
        self._began_secs = clock.monotonic() - since_secs

    def begin_again(self) -> None:
        """Restarts the clock, at the beginning of a backup."""
        self._began_secs = clock.monotonic()

    def passed_secs(self) -> float:
        """The time since the last backup, in seconds."""
        return clock.monotonic() - self._began_secs

    def is_due(self) -> bool:
        """Whether a backup is due."""
        return self.passed_secs() >= self.every_secs


@dataclasses.dataclass(kw_only=True)
class Schedule:
    """Decides which tiers are due at a step; all processes of a world decide the same.

    Attributes:
      chosen: the tiers.
      clock: the clock for backups that are due by time.
      agree: a function that returns host 0's arguments in every process.
      stored: the steps that a policy sees, in ascending order: the step that the run
        resumed from, if any, and all steps due to be saved to storage since then.
    """

    chosen: Chosen
    clock: BackupClock
    agree: Callable[[bool, int], tuple[bool, int]]
    stored: list[Any] = dataclasses.field(default_factory=list)
    _is_time: bool = False
    # The next step at which hosts check host 0's clock.
    _next_look: int = 0

    def note_save(self, step: Any, *, back_up: bool) -> None:
        """Records that a save has begun."""
        if back_up:
            self.stored.append(step)
        if self.chosen.local is None:
            self.clock.begin_again()
        self._is_time, self._next_look = False, 0

    def is_due(self, step: Any, *, is_saving: bool) -> bool:
        """Whether any tier is due."""
        local, persistent = self.chosen.local, self.chosen.persistent
        if any(t and t.every and step.step % t.every == 0 for t in (local, persistent)):
            return True
        if persistent is not None and persistent.every is not None:
            return self._is_preempted(step)
        return self.is_backup_due(step, is_saving=is_saving)

    def is_backup_due(
        self, step: Any, *, is_saving: bool, is_leaving_world: bool = False
    ) -> bool:
        """Whether a saved step goes to persistent storage.

        It does if a backup became due at this step or at any step since the last
        backup, because the caller need not save every step at which a backup is due. It
        also does if the job is about to be preempted.

        With a local tier, backups that are due by time are decided by `SaveStages`.

        Args:
          step: the step, with its number, time and metrics.
          is_saving: whether a save is in progress.
          is_leaving_world: whether the run continues in another world, so that a
            termination signal does not mean preemption.
        """
        persistent = self.chosen.persistent
        if persistent is None:
            return False
        preempted = not is_leaving_world and self._is_preempted(step)
        policy, every = persistent.save_decision_policy, persistent.every
        if policy is not None:
            context = ocp.training.save_decision_policies.DecisionContext(
                is_saving_in_progress=is_saving,
                reached_preemption=preempted,
                multiprocessing_options=ocp.options.MultiprocessingOptions().v0(),
            )
            return policy.should_save(step, self.stored, context=context)
        if preempted:
            return True
        if every is not None:
            # The caller may not have saved the step at which the backup was due.
            is_overdue = step.step // every > self._backed_up() // every
            return is_overdue or step.step % every == 0
        return self.chosen.local is None and self._has_time_passed(step.step)

    def _backed_up(self) -> int:
        return self.stored[-1].step if self.stored else 0

    def _is_preempted(self, step: Any) -> bool:
        # The steps in RAM would be lost with the machines.
        return preemption.reached(step.step, multihost.reached_preemption)

    def _has_time_passed(self, step: int) -> bool:
        if not self._is_time and step >= self._next_look:
            passed_secs = self.clock.passed_secs()
            step_secs = passed_secs / max(1, step - self._backed_up())
            # Uses half of the remaining time, because the time per step may change.
            left = (self.clock.every_secs - passed_secs) / (2 * max(step_secs, 1e-6))
            skipped = int(min(_MOST_STEPS, max(1, left)))
            self._is_time, skipped = self.agree(self.clock.is_due(), skipped)
            self._next_look = step + skipped
        return self._is_time
