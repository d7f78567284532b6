"""When to save: at which steps the local and the persistent tier are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import clock, preemption
from elastic_ckpt.tiers.choices import Chosen

# The most steps between two comparisons of clocks, if clocks decide.
_MOST_STEPS = 16


class BackupClock:
    """Whether a backup is due because of the time since the last one.

    Args:
      every_minutes: between two backups; None if only steps count.
      since_secs: the time since the last backup, which an earlier world may have made.
    """

    def __init__(
        self, every_minutes: float | None = None, *, since_secs: float = 0.0
    ) -> None:
        self.every_secs = math.inf if every_minutes is None else 60 * every_minutes
        self._began_secs = clock.monotonic() - since_secs

    def begin_again(self) -> None:
        """Notes that a backup begins now."""
        self._began_secs = clock.monotonic()

    def left_secs(self) -> float:
        """The time until a backup is due; not above 0 if one is."""
        return self._began_secs + self.every_secs - clock.monotonic()


class Schedule:
    """Decides which tiers are due at a step, the same in every process of a world.

    Args:
      chosen: the tiers.
      clock: of backups.
      agree: returns the values of host 0, in every process.
    """

    def __init__(
        self,
        chosen: Chosen,
        clock: BackupClock,
        *,
        agree: Callable[[bool, int], tuple[bool, int]],
    ) -> None:
        self._local = chosen.local
        self._persistent = chosen.persistent
        self._clock = clock
        self._agree = agree
        # The steps that a policy is given: that of the start, and those stored since.
        self._stored: list[Any] = []
        # The step of the start, or the newest that was to be stored since.
        self._backed_up = 0
        self._is_time = False
        # The step at which hosts compare clocks next, and when they did last.
        self._next_look = 0
        self._last_look: tuple[int, float] | None = None

    def go_on_from(self, steps: Sequence[Any]) -> None:
        """Notes the complete steps from which a run goes on, ascending."""
        self._stored = list(steps)
        self._backed_up = steps[-1].step if steps else 0

    def note_save(self, step: Any, *, back_up: bool) -> None:
        """Notes that a save was begun.

        Args:
          step: with its number, time and metrics.
          back_up: whether it goes to persistent storage.
        """
        if back_up:
            self._stored.append(step)
            self._backed_up = step.step
        if self._local is None:
            self._clock.begin_again()
        self._is_time, self._last_look = False, None
        self._next_look = 0

    def is_due(self, step: Any, *, is_saving: bool) -> bool:
        """Whether any tier is due.

        Args:
          step: as for `note_save`.
          is_saving: whether a save is under way.
        """
        if self._local is not None and step.step % self._local.every == 0:
            return True
        if self._persistent is None or self._persistent.every is None:
            return self.is_backup_due(step, is_saving=is_saving)
        is_multiple = step.step % self._persistent.every == 0
        return is_multiple or self._is_preempted(step)

    def is_backup_due(
        self, step: Any, *, is_saving: bool, is_left: bool = False
    ) -> bool:
        """Whether a step that is saved goes to persistent storage.

        It does if storage has become due since the last backup, at this step or before:
        a caller may save none of the steps at which it is. So does each step when the
        job is about to be preempted.

        Beside a local tier, minutes are counted by the stages of a save.

        Args:
          step: as for `note_save`.
          is_saving: whether a save is under way.
          is_left: whether the run goes on in another world, so that the signal to leave
            means no preemption.
        """
        if self._persistent is None:
            return False
        preempted = not is_left and self._is_preempted(step)
        policy = self._persistent.save_decision_policy
        if policy is not None:
            context = ocp.training.save_decision_policies.DecisionContext(
                is_saving_in_progress=is_saving,
                reached_preemption=preempted,
                multiprocessing_options=ocp.options.MultiprocessingOptions().v0(),
            )
            return policy.should_save(step, self._stored, context=context)
        if preempted:
            return True
        every = self._persistent.every
        if every is not None:
            is_overdue = step.step // every > self._backed_up // every
            return is_overdue or step.step % every == 0
        return self._local is None and self._has_time_passed(step.step)

    def _is_preempted(self, step: Any) -> bool:
        # The memory of hosts is lost with the machines.
        return preemption.reached(step.step, multihost.reached_preemption)

    def _has_time_passed(self, step: int) -> bool:
        if self._is_time or step < self._next_look:
            return self._is_time
        now_secs = clock.monotonic()
        left_secs = self._clock.left_secs()
        skipped = 1
        if self._last_look is not None:
            last_step, last_secs = self._last_look
            step_secs = (now_secs - last_secs) / max(1, step - last_step)
            # Half of what is left: steps may become slower.
            left = left_secs / (2 * max(step_secs, 1e-6))
            skipped = int(min(_MOST_STEPS, max(1, left)))
        self._last_look = (step, now_secs)
        self._is_time, skipped = self._agree(left_secs <= 0, skipped)
        self._next_look = step + skipped
        return self._is_time
