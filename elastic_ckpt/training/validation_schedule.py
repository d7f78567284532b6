"""Decides when a run compares the copies of its state: before saves, at intervals.

Each save compares replicated components by itself (`CapturedStep.compare_components`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from elastic_ckpt.checkpoint.components import validation
from elastic_ckpt.core import errors, events, metrics, topology


@dataclasses.dataclass(kw_only=True)
class ValidationSchedule:
    """Validates a run's state before saves, at intervals, or both.

    The first finding pins the newest saved step at which all copies were identical, so
    that retention does not leave only steps whose copies differed.

    Attributes:
      level: the level at which copies are compared; see `validate`.
      at_saves: whether to compare before each save.
      interval: the number of steps between additional comparisons; 0 disables them.
      stops: whether a finding stops the run, before the step is saved.
      emit: a function called for each finding and after each validation.
      preserve: a function called on all hosts with the last step after which all copies
        were identical; it pins the newest saved step up to that step and returns the
        pinned step, if any.
      equal_step: the last step after which all copies were identical, such as a
        restored step; None once that step is preserved.
    """

    level: validation.Level
    at_saves: bool = True
    interval: int = 0
    stops: bool = False
    emit: events.Emit
    preserve: Callable[[int], int | None] = lambda _: None
    equal_step: int | None = None

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Whether to validate after `step` steps."""
        is_at_interval = self.interval > 0 and step % self.interval == 0
        return is_at_interval or (is_saving and self.at_saves)

    def run(
        self, step: int, state: Any, *, components: Any = None
    ) -> list[validation.Finding]:
        """Validates the state after `step` steps; all hosts must call this.

        Args:
          step: the number of completed steps.
          state: the tree of weights and optimizer state.
          components: values that must be the same on all hosts, keyed by name.

        Raises:
          RunError: if copies differ and `stops` is set.
        """
        began_secs = time.monotonic()
        findings = [
            finding
            for tree in (state, components)
            for finding in validation.validate(tree, level=self.level)
        ]
        secs = time.monotonic() - began_secs
        metrics.VALIDATION.record(secs)
        if topology.is_primary():
            # The findings are the same on all hosts.
            validation.report(step, findings, emit=self.emit)
            self.emit(
                "validated",
                step=step,
                level=self.level,
                findings=len(findings),
                secs=secs,
            )
        if findings and self.stops:
            raise errors.RunError(
                f"after step {step}, copies that should be identical differ:"
                f" {findings[0]} ({len(findings)} in total; see the run's"
                " `replicas_differ` events). The step was not saved. Restart the run"
                " without these hosts, and check their memory: the run resumes from the"
                " newest saved step. To continue despite the differences, set"
                " replica_validation_action=warn"
            )
        before = self.equal_step if findings else None
        kept = None if before is None else self.preserve(before)
        self.equal_step = None if findings else step
        if kept is not None:
            why = f"the copies of the state differ after step {step}"
            self.emit("step_preserved", step=kept, why=why)
        return findings
