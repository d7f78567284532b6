"""A host's answers to a driver's calls."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host.verified_read import BadCopy
from elastic_ckpt.steps.step import Line, StepId


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """A complete step, with the attributes of Orbax's class of the same name.

    Attributes:
      step: the training step.
      save: the ID of this save, because a step may be saved again after the run rolled
        back to an earlier step; empty if stock Orbax saved the step.
      line: the step's history: the `(step, save)` pair of each save that the run
        resumed from on the way to this step, oldest first, then the step's own pair. A
        run that did not start from a saved step begins with `(0, "")`.
      path: the step directory in persistent storage; None if the step was found only in
        RAM.
      metrics: the metrics that the step was saved with; None if there are none.
      custom_metadata: the metadata that the user saved; None if there is none.
      commit_timestamp_nsecs: when the step was committed, in nanoseconds since 1970.
      init_timestamp_nsecs: when the save began, in nanoseconds since 1970; None if
        unknown.
      metadata: the requested pytree with abstract leaves, or the abstract trees of all
        checkpointables (None for a component), keyed by name. A string leaf is
        `"string"`. Orbax's own metadata if stock Orbax saved the step; None if the
        steps were only listed.
    """

    step: int
    save: str
    line: tuple[StepId, ...] = ()
    path: epath.Path | None = dataclasses.field(default=None, compare=False)
    metrics: Any = dataclasses.field(default=None, compare=False)
    custom_metadata: Any = dataclasses.field(default=None, compare=False)
    commit_timestamp_nsecs: int | None = dataclasses.field(default=None, compare=False)
    init_timestamp_nsecs: int | None = dataclasses.field(default=None, compare=False)
    metadata: Any = None

    @property
    def step_id(self) -> StepId:
        """The step and the save."""
        return StepId(self.step, self.save)

    @property
    def time(self) -> datetime.datetime:
        """When the step was committed, in UTC."""
        return _time(self.commit_timestamp_nsecs or 0)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When the step was committed, in UTC; None if unknown."""
        return None if self.commit_timestamp_nsecs is None else self.time

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When the save began, in UTC; None if unknown."""
        nsecs = self.init_timestamp_nsecs
        return None if nsecs is None else _time(nsecs)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A save of a step as examined by host 0; a `steps.search.Examined`.

    Attributes:
      problem: why the save cannot be read; None if it is complete.
    """

    checkpoint: CheckpointMetadata
    problem: str | None

    @property
    def step_id(self) -> StepId:
        """The step and the save that it counts as."""
        return self.checkpoint.line[-1]

    @property
    def parents(self) -> tuple[StepId, ...]:
        """See `Contents.parents`."""
        return self.checkpoint.line[:-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchableSteps:
    """The searchable contents of all hosts and storage.

    Attributes:
      saves: the steps that may exist, for `Search`.
      lines: the lines recorded in storage.
      out_of_reach: why storage cannot be searched; None if it can be, or if there is no
        storage.
      refusing: a message for each peer that may have steps but refuses this run.
      nothing: the beginning of a sentence that explains why there is no step.
    """

    saves: tuple[StepId, ...]
    lines: tuple[Line, ...]
    out_of_reach: str | None
    refusing: tuple[str, ...]
    nothing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadParts:
    """The parts of a step that a host has read.

    Attributes:
      num_bytes: the number of bytes read, by the holder's nearness.
      directory: a directory with one subdirectory of files per component.
      bad: the bad copies that the host found.
    """

    num_bytes: Mapping[str, int]
    directory: str
    bad: tuple[BadCopy, ...]


def _time(nsecs: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)
