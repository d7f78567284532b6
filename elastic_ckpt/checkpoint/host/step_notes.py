"""A step that hosts have written: its name, its parts, and the notes of the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.steps.step_id import StepId

Parts = Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNotes:
    """Notes that hosts may have made differently; those of host 0 count.

    Attributes:
      metrics: that the step is saved with, as JSON text; None if there are none.
      custom_metadata: that a user added, as JSON text; None if there is nothing.
      texts: the leaves of the trees that are texts.
      parts_digest: of `HostParts`, which may not differ.
    """

    metrics: str | None
    custom_metadata: str | None
    texts: tuple[str, ...]
    parts_digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostParts:
    """What a host saves: the same on all hosts.

    Attributes:
      kinds: by the path of a leaf or the name of a component, what it is.
    """

    kinds: Mapping[str, str]


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
    trees: str | None
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
