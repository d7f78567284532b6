"""Validation of the state of a run: before saves, at intervals, and what follows."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

from absl import logging

from elastic_ckpt.components import validation
from elastic_ckpt.config.validation_section import ValidationSection
from elastic_ckpt.core import errors, events, metrics, topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSchedule:
    """Validates the state of a run as it is configured.

    Attributes:
      section: the level, when to validate, and what follows a finding.
      emit: called for each finding, and after each validation.
    """

    section: ValidationSection
    emit: events.Emit

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Whether to validate now that `step` steps are done.

        Args:
          step: the number of steps done.
          is_saving: whether the step is saved next.
        """
        interval = self.section.replica_validation_interval
        if is_saving and self.section.replica_validation_at_saves:
            return True
        return interval > 0 and step % interval == 0

    def run(self, step: int, state: Any) -> list[validation.Finding]:
        """Validates the state after `step` steps; all hosts call it.

        Raises:
          RunError: if copies differ and the run is to stop then.
        """
        began_secs = time.monotonic()
        level = self.section.replica_validation
        findings = validation.validate(
            state,
            level=cast(validation.Level, level),
            tolerance=self.section.replica_validation_tolerance,
        )
        secs = time.monotonic() - began_secs
        metrics.VALIDATION.record(secs)
        if topology.is_primary():
            # The findings are the same on all hosts.
            self._report(step, findings, secs)
        if findings and self.section.replica_validation_action == "stop":
            raise errors.RunError(
                f"after step {step} copies differ that should be equal:"
                f" {findings[0]} ({len(findings)} in all, see `replicas_differ` in the"
                " run's events); the step is not saved. Check the memory of these"
                " hosts, and start the run again without them: it continues from the"
                " newest saved step. replica_validation_action=warn goes on instead"
            )
        return findings

    def _report(
        self, step: int, findings: list[validation.Finding], secs: float
    ) -> None:
        if findings:
            metrics.VALIDATION_FINDINGS.record(len(findings))
        for finding in findings:
            logging.error("step %d: copies differ: %s", step, finding)
            self.emit(
                "replicas_differ",
                step=step,
                leaf=finding.leaf,
                hosts=list(finding.hosts),
                devices=list(finding.devices),
                is_certain=finding.is_certain,
                why=str(finding),
            )
        self.emit(
            "validated",
            step=step,
            level=self.section.replica_validation,
            findings=len(findings),
            secs=secs,
        )


def configured(
    section: ValidationSection, emit: events.Emit
) -> ValidationSchedule | None:
    """The validation that `section` asks for; None if it asks for none."""
    if section.replica_validation == "none":
        return None
    return ValidationSchedule(section=section, emit=emit)
