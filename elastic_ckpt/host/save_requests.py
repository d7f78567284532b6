"""Requests of a save: hosts write, commit and remove steps in RAM."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.host.answers import Written
from elastic_ckpt.host.step_notes import OfStep, OfWrittenStep
from elastic_ckpt.host.world_requests import AnyHost


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteStep(OfStep):
    """Writes the captured values.

    Attributes:
      components: that have written their files.
      problem: why the step cannot be written, on this driver; None if it can.
    """

    components: tuple[str, ...]
    problem: str | None

    def run(self, host: AnyHost) -> Written:
        """See `HostSaver.write`."""
        return host.tiers.saver.write(
            self.step, self.save, self.components, self.problem
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListWritten(OfStep):
    """Asks for the answer of `WriteStep`, of a step that does not fit into RAM."""

    def run(self, host: AnyHost) -> Written:
        """See `HostSaver.files`."""
        return host.tiers.saver.files(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoldStep(OfWrittenStep):
    """Keeps the captured values, so that a backup reads them instead of a RAM disk."""

    def run(self, host: AnyHost) -> None:
        """See `HostSaver.hold`."""
        host.tiers.saver.hold(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigestHeld(OfStep):
    """Asks for digests of what several hosts hold of a step that is held.

    Attributes:
      under: see `CapturedStep.digests`.
    """

    under: tuple[str, ...]

    def run(self, host: AnyHost) -> dict[str, str]:
        """See `CapturedStep.digests`."""
        return host.tiers.world.captured[self.step, self.save].digests(self.under)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitStep(OfWrittenStep):
    """Commits a host's part of a step."""

    def run(self, host: AnyHost) -> None:
        """See `HostSaver.commit`."""
        host.tiers.saver.commit(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbandonStep(OfStep):
    """Removes the files that a host wrote of a step, committed or not."""

    def run(self, host: AnyHost) -> None:
        """See `HostSaver.abandon`."""
        host.tiers.saver.abandon(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectSteps(OfStep):
    """Removes steps that are not needed after a step is complete.

    Attributes:
      in_flight: steps that are, or will be, backed up.
      preserved: steps that are preserved by hand on any machine.
      parents: of the save.
    """

    in_flight: tuple[int, ...]
    preserved: tuple[int, ...]
    parents: tuple[tuple[int, str], ...]

    def run(self, host: AnyHost) -> None:
        """See `HostSaver.collect`."""
        host.tiers.saver.collect(
            self.step, self.save, self.in_flight, self.preserved, self.parents
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveStep:
    """Removes all saves of a step from RAM; the answer is whether there were any.

    Attributes:
      step: the training step.
    """

    step: int

    def run(self, host: AnyHost) -> bool:
        """See `HostSaver.remove`."""
        return host.tiers.saver.remove(self.step)
