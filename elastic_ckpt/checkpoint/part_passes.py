"""The passes by which parts go up the tree of hosts to host 0, and down again.

See `host.part_exchange`: all hosts end a pass before any begins the next. Messages that
a host cannot read, because an agent does not answer, go by way of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from absl import logging

from elastic_ckpt.checkpoint.host.part_exchange import Kind, Letter, tree_of
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts

AnswerT = TypeVar("AnswerT")


def exchanged(
    hosts: Hosts,
    kind: Kind,
    *,
    offer: Callable[[], list[None]],
    decide: Callable[[], AnswerT],
) -> AnswerT:
    """Has host 0 decide by what all hosts offer, and deal each host its parts.

    Args:
      hosts: of the world.
      kind: of the exchange.
      offer: has all hosts offer what they have.
      decide: has host 0 decide.

    Returns:
      The answer of host 0.

    Raises:
      HostsFailedError: if any of it failed.
    """
    gather(hosts, kind, offer)
    return deal(hosts, kind, decide)


def gather(hosts: Hosts, kind: Kind, offer: Callable[[], list[None]]) -> None:
    """Passes what all hosts offer to host 0; see `exchanged`."""
    offer()
    for level in range(tree_of(hosts.num_hosts).depth - 1, -1, -1):
        _pass(hosts, kind, HostWorld.merge_parts, level)


def deal(hosts: Hosts, kind: Kind, decide: Callable[[], AnswerT]) -> AnswerT:
    """Passes what host 0 deals to all hosts; returns its answer.

    See `exchanged`.
    """
    decision = decide()
    for level in range(1, tree_of(hosts.num_hosts).depth + 1):
        _pass(hosts, kind, HostWorld.pass_parts, level)
    return decision


def _pass(
    hosts: Hosts,
    kind: Kind,
    method: Callable[[HostWorld, Kind, int], tuple[Letter, ...]],
    level: int,
) -> None:
    letters = tuple(
        each for unread in hosts.all(method, kind, level) for each in unread
    )
    if not letters:
        return
    logging.warning(
        "%d messages cannot be read at the agents of their machines; the hosts %s send"
        " them",
        len(letters),
        sorted({letter.writer for letter in letters}),
    )
    forwarded = hosts.all(HostWorld.forward_mail, kind, letters)
    hosts.all(HostWorld.deliver_mail, kind, letters, tuple(forwarded))
    hosts.all(method, kind, level)
