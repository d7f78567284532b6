"""Requests by which hosts copy parts of a step from each other."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.host.answers import Placed, Replicated
from elastic_ckpt.host.step_notes import OfStep
from elastic_ckpt.host.world_requests import AnyHost


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferParts(OfStep):
    """Offers what a host has of a step."""

    def run(self, host: AnyHost) -> None:
        """See `HostCopies.offer`."""
        host.tiers.copies.offer(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceCopies(OfStep):
    """Places the copies of a step."""

    def run(self, host: AnyHost) -> Placed:
        """See `HostCopies.place`."""
        return host.tiers.copies.place(self.step, self.save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicateStep(OfStep):
    """Takes the copies that placement gives a host."""

    def run(self, host: AnyHost) -> Replicated:
        """See `HostCopies.take`."""
        return host.tiers.copies.take(self.step, self.save)
