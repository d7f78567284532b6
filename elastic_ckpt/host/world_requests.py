"""Requests by which hosts join a world, and leave it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.host.answers import Introduction, JoinedHost
from elastic_ckpt.host.endpoint import HostEndpoint, HostTiers
from elastic_ckpt.manifests.manifest import Host
from elastic_ckpt.tiers.run_identity import Identity, Lines

AnyHost = HostEndpoint[HostTiers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Introduce:
    """Asks a host for what the others need before it has a slot."""

    def run(self, host: AnyHost) -> Introduction:
        """See `UnjoinedHost.introduce`."""
        return host.introduce()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetLines:
    """Asks a host for the lines of what it finds, before it has a slot."""

    def run(self, host: AnyHost) -> Lines:
        """See `UnjoinedHost.lines`."""
        return host.lines()


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinWorld:
    """Gives a host its slot, and the run's secret.

    Attributes:
      slots: of each host, by number.
      secret: of the run.
      identity: of the run; None if it is not known.
    """

    slots: tuple[int, ...]
    secret: str
    identity: Identity | None = None

    def run(self, host: AnyHost) -> JoinedHost:
        """See `UnjoinedHost.join`."""
        return host.join(self.slots, self.secret, self.identity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectHosts:
    """Connects a host to all others.

    Attributes:
      hosts: of the world, by number.
      agents: of their machines and of idle ones; see `known_agents`.
    """

    hosts: tuple[Host, ...]
    agents: Mapping[str, Any]

    def run(self, host: AnyHost) -> None:
        """See `HostInSlot.connect`."""
        host.connect(self.hosts, self.agents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewSave:
    """Asks for a name of the saves from now on.

    Attributes:
      after: a save that it is greater than, as text; empty if there is none.
    """

    after: str

    def run(self, host: AnyHost) -> str:
        """See `HostWorld.new_save`."""
        return host.tiers.world.new_save(self.after)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseHost:
    """Releases all that the host's process has; what was saved stays."""

    def run(self, host: AnyHost) -> None:
        """See `HostEndpoint.close`."""
        host.close()
