"""A step that hosts have written: its name, its parts, and the notes of the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.steps.step_id import StepId

Parts = Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepNotes:
    """The fields of a manifest's `Contents` that the driver fills.

    Attributes:
      metrics: see `Contents`.
      custom_metadata: see `Contents`.
      trees: see `Contents`.
      parents: see `Contents`.
      time_ms: see `Contents`; 0 until the step is written.
      is_due: see `Contents`.
    """

    metrics: str | None
    custom_metadata: str | None
    trees: str
    parents: tuple[StepId, ...]
    time_ms: int = 0
    is_due: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenStep:
    """A step that all hosts have written.

    Attributes:
      step_id: the step.
      parts: by component and file, the number of the part that a file is.
      notes: of the step.
    """

    step_id: StepId
    parts: Parts
    notes: StepNotes
