"""The passes by which parts go up the tree of hosts to host 0, and down again.

See `host.part_exchange`: all hosts end a pass before any begins the next. Messages that
a host cannot read, because an agent does not answer, go by way of the driver.
"""

from __future__ import annotations

from typing import TypeVar

from absl import logging

from elastic_ckpt.checkpoint.hosts import HostRequest, Hosts
from elastic_ckpt.host import part_requests
from elastic_ckpt.host.part_exchange import Kind, Letter, tree_of

AnswerT = TypeVar("AnswerT")


def exchanged(
    hosts: Hosts, kind: Kind, *, offer: HostRequest[None], decide: HostRequest[AnswerT]
) -> AnswerT:
    """Has host 0 decide by what all hosts offer, and deal each host its parts.

    Args:
      hosts: of the world.
      kind: of the exchange.
      offer: has a host offer what it has.
      decide: has host 0 decide.

    Returns:
      The answer of host 0.

    Raises:
      HostsFailedError: if any of it failed.
    """
    num_hosts = gathered(hosts, kind, offer)
    return dealt(hosts, kind, decide, num_hosts=num_hosts)


def gathered(hosts: Hosts, kind: Kind, offer: HostRequest[None]) -> int:
    """Passes what all hosts offer to host 0; returns the number of hosts.

    Args:
      hosts: of the world.
      kind: of the exchange.
      offer: see `exchanged`.

    Raises:
      HostsFailedError: if any of it failed.
    """
    num_hosts = len(hosts.all(offer))
    for level in range(tree_of(num_hosts).depth - 1, -1, -1):
        _pass(hosts, kind, part_requests.MergeParts(kind=kind, level=level))
    return num_hosts


def dealt(
    hosts: Hosts, kind: Kind, decide: HostRequest[AnswerT], *, num_hosts: int
) -> AnswerT:
    """Passes what host 0 deals to all hosts; returns its answer.

    Args:
      hosts: of the world.
      kind: of the exchange.
      decide: see `exchanged`.
      num_hosts: of the world.

    Raises:
      HostsFailedError: if any of it failed.
    """
    decision = hosts.first(decide)
    for level in range(1, tree_of(num_hosts).depth + 1):
        _pass(hosts, kind, part_requests.PassParts(kind=kind, level=level))
    return decision


def _pass(hosts: Hosts, kind: Kind, request: HostRequest[tuple[Letter, ...]]) -> None:
    letters = tuple(each for unread in hosts.all(request) for each in unread)
    if not letters:
        return
    logging.warning(
        "%d messages cannot be read at the agents of their machines; the hosts %s send"
        " them",
        len(letters),
        sorted({letter.writer for letter in letters}),
    )
    forwarded = hosts.all(part_requests.ForwardMail(kind=kind, letters=letters))
    hosts.all(
        part_requests.DeliverMail(
            kind=kind, letters=letters, forwarded=tuple(forwarded)
        )
    )
    hosts.all(request)
