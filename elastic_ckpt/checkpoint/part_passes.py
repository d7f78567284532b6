"""The passes by which parts go up the tree of hosts to host 0, and down again.

See `host.part_exchange`: all hosts end a pass before any begins the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_ckpt.checkpoint.hosts import HostRequest, Hosts
from elastic_ckpt.host.part_exchange import tree_of

AnswerT = TypeVar("AnswerT")


def exchanged(
    hosts: Hosts,
    *,
    offer: HostRequest[None],
    merge: Callable[[int], HostRequest[None]],
    decide: HostRequest[AnswerT],
    pass_on: Callable[[int], HostRequest[None]],
) -> AnswerT:
    """Has host 0 decide by what all hosts offer, and deal each host its parts.

    Args:
      hosts: of the world.
      offer: has a host offer what it has.
      merge: has the hosts of a level merge what is offered below them.
      decide: has host 0 decide.
      pass_on: has the hosts of a level pass on what is for hosts below them.

    Returns:
      The answer of host 0.

    Raises:
      HostsFailedError: if any of it failed.
    """
    num_hosts = gathered(hosts, offer=offer, merge=merge)
    return dealt(hosts, num_hosts, decide=decide, pass_on=pass_on)


def gathered(
    hosts: Hosts,
    *,
    offer: HostRequest[None],
    merge: Callable[[int], HostRequest[None]],
) -> int:
    """Passes what all hosts offer to host 0; returns the number of hosts.

    Args:
      hosts: of the world.
      offer: see `exchanged`.
      merge: see `exchanged`.

    Raises:
      HostsFailedError: if any of it failed.
    """
    num_hosts = len(hosts.all(offer))
    for level in range(tree_of(num_hosts).depth - 1, 0, -1):
        hosts.all(merge(level))
    return num_hosts


def dealt(
    hosts: Hosts,
    num_hosts: int,
    *,
    decide: HostRequest[AnswerT],
    pass_on: Callable[[int], HostRequest[None]],
) -> AnswerT:
    """Passes what host 0 deals to all hosts; returns its answer.

    Args:
      hosts: of the world.
      num_hosts: of the world.
      decide: see `exchanged`.
      pass_on: see `exchanged`.

    Raises:
      HostsFailedError: if any of it failed.
    """
    decision = hosts.first(decide)
    for level in range(1, tree_of(num_hosts).depth):
        hosts.all(pass_on(level))
    return decision
