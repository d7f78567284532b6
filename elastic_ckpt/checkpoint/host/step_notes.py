"""A step that hosts have written: its name, its parts, and the notes of the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from elastic_ckpt.steps.step import StepId


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


class FileAtHosts(NamedTuple):
    """A file of a component.

    Attributes:
      num_bytes: its length.
      hosts: that have written it, ascending.
    """

    num_bytes: int
    hosts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenStep:
    """A step that all hosts have written.

    Attributes:
      step_id: the step.
      components: their names.
      files: of components, by path.
      notes: of the step.
    """

    step_id: StepId
    components: tuple[str, ...]
    files: Mapping[str, FileAtHosts]
    notes: StepNotes
