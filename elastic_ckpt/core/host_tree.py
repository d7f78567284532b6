"""A tree over the hosts of a world, along which they pass messages.

Host 0 is the root. The hosts below any host follow it, and its children split them
evenly, so that those of one slice pass messages to each other first, and siblings have
as much to do as each other. Each host has at most `fan_in + 1` neighbours, and a
message from any host is at the root after `log(num_hosts)` passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

# Eight neighbours cost little, and 10,000 hosts are five passes deep.
FAN_IN = 8
# When hosts do their part: at the same time, after all hosts below them, or after all
# above.
Order = Literal["together", "up", "down"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTree:
    """The tree.

    Attributes:
      num_hosts: of the world.
      fan_in: the most children of a host.
    """

    num_hosts: int
    fan_in: int = FAN_IN

    def parent(self, host: int) -> int | None:
        """The parent of a host; None of host 0."""
        return self._way(host)[-2].start if host else None

    def children(self, host: int) -> list[int]:
        """The children of a host, ascending."""
        return [part.start for part in self._split(self.below(host))]

    def below(self, host: int) -> range:
        """A host and all below it."""
        return self._way(host)[-1]

    def level(self, host: int) -> int:
        """The passes between a host and the root."""
        return len(self._way(host)) - 1

    def depth(self, host: int) -> int:
        """The passes between the deepest host below a host and that host."""
        size, depth = len(self.below(host)), 0
        while size > 1:
            # Of the children, the first has the most hosts below it.
            size, depth = -((1 - size) // self.fan_in), depth + 1
        return depth

    def in_order(self, order: Order) -> list[Sequence[int]]:
        """The hosts in groups, each of which waits for the one before it."""
        if order == "together":
            return [range(self.num_hosts)]
        levels, parts = [], [range(self.num_hosts)]
        while parts:
            levels.append([part.start for part in parts])
            parts = [each for part in parts for each in self._split(part)]
        return [*(levels if order == "down" else reversed(levels))]

    def _way(self, host: int) -> list[range]:
        # From the root to a host: each with all below it.
        way = [range(self.num_hosts)]
        while way[-1].start != host:
            way.append(next(part for part in self._split(way[-1]) if host in part))
        return way

    def _split(self, hosts: range) -> list[range]:
        # The children of the first of some hosts, each with all below it.
        num_below = len(hosts) - 1
        if not num_below:
            return []
        num_parts = min(self.fan_in, num_below)
        ends = [
            hosts.start + 1 - (-number * num_below // num_parts)
            for number in range(num_parts + 1)
        ]
        return [range(*pair) for pair in itertools.pairwise(ends)]
