"""Requests of a backup: what hosts upload, commit and remove in persistent storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.host import backlog
from elastic_ckpt.host.answers import BackedUp, StepInRam
from elastic_ckpt.host.step_notes import OfBackup, OfStep
from elastic_ckpt.host.world_requests import AnyHost
from elastic_ckpt.manifests.line import Line
from elastic_ckpt.manifests.manifest import Contents
from elastic_ckpt.tiers.persistent.claims import Claimant


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleanUploads:
    """Removes uploads of crashed worlds; the answer has their steps and paths.

    Attributes:
      save: of this world.
    """

    save: str

    def run(self, host: AnyHost) -> tuple[tuple[int, str], ...]:
        """See `HostBackup.clean`."""
        return tuple(host.tiers.backup.clean(self.save))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginLine:
    """Records a line in storage; the answer is the number of the claimed world.

    Attributes:
      line: of a committed step, or of a world that begins.
      claimant: who claims the world; None claims none.
    """

    line: Line
    claimant: Claimant | None = None

    def run(self, host: AnyHost) -> int:
        """See `HostBackup.begin_line`."""
        return host.tiers.backup.begin_line(self.line, self.claimant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetSecsSinceBackup:
    """Asks how long ago the newest step was committed in storage, in seconds."""

    def run(self, host: AnyHost) -> float:
        """See `backlog.secs_since_backup`."""
        return backlog.secs_since_backup(host.tiers.world)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetSecsUntilPeersAreAsked:
    """Asks how long a host still leaves peers alone that have failed, in seconds."""

    def run(self, host: AnyHost) -> float:
        """See `PeerClient.left_skipped_secs`."""
        return host.tiers.world.client.left_skipped_secs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListStepsInRam:
    """Asks for the steps that are whole in RAM, and whether storage has them.

    Attributes:
      line: of the driver; steps that it abandons are left out.
    """

    line: Line

    def run(self, host: AnyHost) -> tuple[StepInRam, ...]:
        """See `backlog.steps_in_ram`."""
        return tuple(backlog.steps_in_ram(host.tiers.world, self.line))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetSavedContents(OfStep):
    """Asks for the contents of a step in RAM."""

    def run(self, host: AnyHost) -> Contents:
        """See `HostBackup.contents`."""
        return host.tiers.backup.contents(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferToBackUp(OfStep):
    """Offers what a host has of a step in RAM."""

    def run(self, host: AnyHost) -> None:
        """See `HostBackup.offer`."""
        host.tiers.backup.offer(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetChunkShapes(OfStep):
    """Deals a step to all hosts; the answer has the shape of each leaf's chunks."""

    def run(self, host: AnyHost) -> Mapping[str, tuple[int, ...]]:
        """See `HostBackup.chunk_shapes`."""
        return host.tiers.backup.chunk_shapes(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackUpStep(OfBackup):
    """Uploads a host's share of a step."""

    def run(self, host: AnyHost) -> BackedUp:
        """See `HostBackup.back_up`."""
        return host.tiers.backup.back_up(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitBackup(OfBackup):
    """Makes a checkpoint of what all hosts have uploaded.

    Attributes:
      orbax_files: the texts of the files that Orbax adds to the values, by path.
    """

    orbax_files: Mapping[str, str]

    def run(self, host: AnyHost) -> None:
        """See `HostBackup.commit`."""
        host.tiers.backup.commit(self, self.orbax_files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectBackups(OfStep):
    """Removes what is not to be kept now that a step is committed to storage.

    Attributes:
      overwrite: whether older saves of the step that were set aside go too.
      parents: of the save.
    """

    overwrite: bool
    parents: tuple[tuple[int, str], ...]

    def run(self, host: AnyHost) -> None:
        """See `HostBackup.collect`."""
        line = Line(save=self.save, parents=self.parents)
        host.tiers.backup.collect(line, self.step, self.overwrite)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordMetrics(OfStep):
    """Records the metrics of an evaluation in storage.

    Attributes:
      metrics: JSON text.
    """

    metrics: str

    def run(self, host: AnyHost) -> None:
        """See `BackupCollector.record`."""
        host.tiers.backup.collector.record(self.step, self.save, self.metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListEvaluations:
    """Asks for the metrics of the evaluations of a line, by training step.

    Attributes:
      line: of the driver.
    """

    line: Line

    def run(self, host: AnyHost) -> tuple[tuple[int, str], ...]:
        """See `BackupCollector.evaluations`; metrics are JSON text."""
        return tuple(host.tiers.backup.collector.evaluations(self.line))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HasBackup(OfStep):
    """Asks whether that save of a step is committed to persistent storage."""

    def run(self, host: AnyHost) -> bool:
        """See `HostBackup.holds`."""
        return host.tiers.backup.holds(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveBackup:
    """Removes all saves of a step from storage; the answer is whether there were any.

    Attributes:
      step: the training step.
    """

    step: int

    def run(self, host: AnyHost) -> bool:
        """See `HostBackup.remove`."""
        return host.tiers.backup.remove(self.step)
