"""Requests by which parts pass up the tree of hosts and down again."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.host.part_exchange import Kind
from elastic_ckpt.host.world_requests import AnyHost


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfLevel:
    """Fields of requests that concern the hosts of one level.

    Attributes:
      kind: of the exchange.
      level: of the tree of hosts.
    """

    kind: Kind
    level: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeParts(_OfLevel):
    """Merges what is offered below the hosts of a level."""

    def run(self, host: AnyHost) -> None:
        """See `PartExchange.merge`."""
        host.tiers.world.exchanges[self.kind].merge(self.level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassParts(_OfLevel):
    """Passes on what is for the hosts below those of a level."""

    def run(self, host: AnyHost) -> None:
        """See `PartExchange.pass_on`."""
        host.tiers.world.exchanges[self.kind].pass_on(self.level)
