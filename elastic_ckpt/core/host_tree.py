"""A tree over the hosts of a world, along which they pass messages.

Host 0 is the root. The children of host n are the hosts `fan_in * n + 1` and following,
as in a heap, so each host has at most `fan_in + 1` neighbours, and a message from any
host is at the root after `log(num_hosts)` passes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTree:
    """The tree.

    Attributes:
      num_hosts: of the world.
      fan_in: the most children of a host.
    """

    num_hosts: int
    fan_in: int

    def parent(self, host: int) -> int | None:
        """The parent of a host; None of host 0."""
        return (host - 1) // self.fan_in if host else None

    def children(self, host: int) -> range:
        """The children of a host, ascending."""
        first = self.fan_in * host + 1
        return range(
            min(first, self.num_hosts), min(first + self.fan_in, self.num_hosts)
        )

    def level(self, host: int) -> int:
        """The passes between a host and the root."""
        level = 0
        while host:
            host, level = (host - 1) // self.fan_in, level + 1
        return level

    @property
    def depth(self) -> int:
        """The level of the last host, which is the deepest."""
        return self.level(self.num_hosts - 1)

    def below(self, host: int) -> list[int]:
        """A host and all below it, level by level."""
        first, end, hosts = host, host + 1, []
        while first < self.num_hosts:
            hosts += range(first, min(end, self.num_hosts))
            first, end = self.fan_in * first + 1, self.fan_in * end + 1
        return hosts
