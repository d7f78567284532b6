"""Notes of a step: what the driver records of it besides values and files."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNotes:
    """Notes that hosts may have made differently; those of host 0 count.

    Attributes:
      metrics: that the step is saved with, as JSON text; None if there are none.
      custom_metadata: that a user added, as JSON text; None if there is nothing.
      texts: the leaves of the trees that are texts.
    """

    metrics: str | None
    custom_metadata: str | None
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepNotes:
    """The fields of a manifest's `Contents` that the driver fills.

    Attributes:
      metrics: see `Contents`.
      custom_metadata: see `Contents`.
      trees: see `Contents`.
      parents: see `Contents`.
      time_ms: see `Contents`; 0 until the step is written.
    """

    metrics: str | None
    custom_metadata: str | None
    trees: str | None
    parents: tuple[tuple[int, str], ...]
    time_ms: int = 0
