"""Requests by which hosts share a step that they restore; see `step_sharing`."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.host.step_notes import OfStep
from elastic_ckpt.host.world_requests import AnyHost


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferSaves:
    """Offers the steps that a host has."""

    def run(self, host: AnyHost) -> None:
        """See `StepSharing.offer_saves`."""
        host.tiers.reader.sharing.offer_saves()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferStep:
    """Offers what a host has of a step.

    Attributes:
      step: the training step.
    """

    step: int

    def run(self, host: AnyHost) -> None:
        """See `StepSharing.offer_step`."""
        host.tiers.reader.sharing.offer_step(self.step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareStep(OfStep):
    """Passes the contents of a step to all hosts."""

    def run(self, host: AnyHost) -> None:
        """See `StepSharing.share`."""
        host.tiers.reader.sharing.share(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferWanted:
    """Offers a list of the boxes that a host needs."""

    def run(self, host: AnyHost) -> None:
        """See `HostReader.offer_wanted`."""
        host.tiers.reader.offer_wanted()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReads(OfStep):
    """Plans the reads of all hosts.

    Attributes:
      components: that all hosts read.
    """

    components: tuple[str, ...]

    def run(self, host: AnyHost) -> None:
        """See `StepSharing.plan`."""
        host.tiers.reader.sharing.plan(self.step, self.save, self.components)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndSharing:
    """Removes the messages of a search after which no step is read."""

    def run(self, host: AnyHost) -> None:
        """See `StepSharing.end`."""
        host.tiers.reader.sharing.end()
