"""The endpoint of a host: what the requests of a driver run on, from first to last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from elastic_ckpt.host.answers import Introduction, JoinedHost
from elastic_ckpt.host.backup import HostBackup
from elastic_ckpt.host.copies import HostCopies
from elastic_ckpt.host.reader import HostReader
from elastic_ckpt.host.saver import HostSaver
from elastic_ckpt.host.unjoined_host import HostInSlot, UnjoinedHost
from elastic_ckpt.host.world import HostConfig, HostWorld
from elastic_ckpt.manifests.manifest import Host
from elastic_ckpt.tiers.run_identity import Identity, Lines


class HostTiers:
    """One host's part in saves, copies, backups and restores.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self.saver = HostSaver(world)
        self.copies = HostCopies(world)
        self.backup = HostBackup(world)
        self.reader = HostReader(world)


TiersT = TypeVar("TiersT", bound=HostTiers, covariant=True)


class HostEndpoint(Generic[TiersT]):
    """A host, which joins its world by three requests and then works for the tiers.

    It is an `UnjoinedHost` at first, then a `HostInSlot`, then has its tiers.

    Args:
      config: of the host.
      make_tiers: makes its tiers, once the world is joined.
    """

    def __init__(
        self, config: HostConfig, make_tiers: Callable[[HostWorld], TiersT]
    ) -> None:
        self._resources = contextlib.ExitStack()
        self._host: UnjoinedHost | HostInSlot | TiersT
        self._host = UnjoinedHost(config, self._resources)
        self._make_tiers = make_tiers

    @property
    def tiers(self) -> TiersT:
        """The tiers of the host, in a world that is joined."""
        assert isinstance(self._host, HostTiers)
        return self._host

    def introduce(self) -> Introduction:
        """See `UnjoinedHost.introduce`."""
        assert isinstance(self._host, UnjoinedHost)
        return self._host.introduce()

    def lines(self) -> Lines:
        """See `UnjoinedHost.lines`."""
        assert isinstance(self._host, UnjoinedHost)
        return self._host.lines()

    def join(
        self, slots: Sequence[int], secret: str, identity: Identity | None
    ) -> JoinedHost:
        """See `UnjoinedHost.join`."""
        assert isinstance(self._host, UnjoinedHost)
        self._host = self._host.join(slots, secret, identity)
        return self._host.joined

    def connect(self, hosts: Sequence[Host], agents: Mapping[str, Any]) -> None:
        """See `HostInSlot.connect`."""
        assert isinstance(self._host, HostInSlot)
        tiers = self._make_tiers(self._host.connect(hosts, agents))
        self._resources.callback(tiers.backup.close)
        self._host = tiers

    def close(self) -> None:
        """Releases the slot, and the agent if this process started it."""
        self._resources.close()
