"""Requests of a restore: what hosts find, read, verify and repair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.host.answers import BadCopyReport, CheckpointMetadata, SearchOutcome
from elastic_ckpt.host.step_notes import OfStep
from elastic_ckpt.host.step_search import Query
from elastic_ckpt.host.world_requests import AnyHost
from elastic_ckpt.manifests.line import Line
from elastic_ckpt.manifests.manifest import Contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindStep:
    """Looks for the newest complete step, or for a certain one.

    Attributes:
      step: None for the newest.
      save: which save of the step; empty for the newest.
      without: steps and saves that proved to be unreadable.
      own_line: that the driver is on, if it has saved something; else None.
      is_shared: whether host 0 keeps the parts of the step, to deal them.
      surveyed: see `HostReader.find`.
    """

    step: int | None
    save: str
    without: tuple[tuple[int, str], ...]
    own_line: Line | None
    is_shared: bool = False
    surveyed: tuple[int, ...] | None = None

    def run(self, host: AnyHost) -> SearchOutcome:
        """See `HostReader.find`."""
        query = Query(self.step, self.without, self.save, self.own_line, self.is_shared)
        return host.tiers.reader.find(query, self.surveyed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListSteps:
    """Asks for the complete steps, ascending."""

    def run(self, host: AnyHost) -> tuple[CheckpointMetadata, ...]:
        """See `HostReader.complete_steps`."""
        return tuple(host.tiers.reader.complete_steps())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenStep(OfStep):
    """Opens a step that is to be read.

    Attributes:
      is_shared: whether host 0 has passed its contents down.
    """

    is_shared: bool = False

    def run(self, host: AnyHost) -> None:
        """See `HostReader.open_step`."""
        host.tiers.reader.open_step(self.step, self.save, is_shared=self.is_shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetContents:
    """Asks for the contents of the step that is open."""

    def run(self, host: AnyHost) -> Contents:
        """See `HostReader.opened`."""
        return host.tiers.reader.opened()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadStep:
    """Reads and verifies what a host needs; the answer has bytes by nearness."""

    def run(self, host: AnyHost) -> Mapping[str, int]:
        """See `HostReader.read`."""
        return host.tiers.reader.read()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaterialiseComponent:
    """Writes the files of a component, verified; the answer is the directory.

    Attributes:
      component: its name.
    """

    component: str

    def run(self, host: AnyHost) -> str:
        """See `HostReader.materialise`."""
        return host.tiers.reader.materialise(self.component)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListBadCopies:
    """Asks for the bad copies that a host came across while it read."""

    def run(self, host: AnyHost) -> tuple[BadCopyReport, ...]:
        """See `HostReader.bad_copies`."""
        return tuple(host.tiers.reader.bad_copies())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairCopies:
    """Repairs what is bad on a host; the answer has the names of what was repaired.

    Attributes:
      bad: copies that any host came across.
    """

    bad: tuple[BadCopyReport, ...]

    def run(self, host: AnyHost) -> tuple[str, ...]:
        """See `HostReader.repair`."""
        return tuple(host.tiers.reader.repair(self.bad))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseStep:
    """Releases what was read of the step that is open."""

    def run(self, host: AnyHost) -> None:
        """See `HostReader.close_step`."""
        host.tiers.reader.close_step()
