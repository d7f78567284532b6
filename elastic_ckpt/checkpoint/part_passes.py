"""The passes by which parts go up the tree of hosts to host 0, and down again.

See `host.part_exchange`: all hosts end a pass before any begins the next. Messages that
a host cannot read, because an agent does not answer, go by way of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from absl import logging

from elastic_ckpt.checkpoint.host.part_exchange import Kind, Letter
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import calls
from elastic_ckpt.core.allgather import HostTree

AnswerT = TypeVar("AnswerT")


def exchanged(
    hosts: Hosts,
    kind: Kind,
    *,
    offer: Callable[[], list[tuple[Letter, ...]]],
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


def gather(
    hosts: Hosts, kind: Kind, offer: Callable[[], list[tuple[Letter, ...]]]
) -> None:
    """Passes what all hosts offer to host 0; see `exchanged`."""
    _repeat(hosts, kind, HostWorld.merge_parts, offer())


def deal(hosts: Hosts, kind: Kind, decide: Callable[[], AnswerT]) -> AnswerT:
    """Passes what host 0 deals to all hosts; returns its answer.

    See `exchanged`.
    """
    decision = decide()
    if hosts.num_hosts > 1:
        method = HostWorld.pass_parts
        _repeat(hosts, kind, method, hosts.all(method, kind))
    return decision


def _repeat(
    hosts: Hosts,
    kind: Kind,
    method: Callable[[HostWorld, Kind], tuple[Letter, ...]],
    answers: list[tuple[Letter, ...]],
) -> None:
    # Repeats a pass until all messages were read that can be. Other messages depend on
    # those of the group of hosts that comes first.
    for group in HostTree(num_hosts=hosts.num_hosts).in_order(calls.of(method).order):
        letters = tuple(letter for number in group for letter in answers[number])
        if not letters:
            continue
        logging.warning(
            "%d messages cannot be read at the agents of their machines; the hosts %s"
            " send them",
            len(letters),
            sorted({letter.writer for letter in letters}),
        )
        forwarded = hosts.all(HostWorld.forward_mail, kind, letters)
        hosts.all(HostWorld.deliver_mail, kind, letters, tuple(forwarded))
        answers = hosts.all(method, kind)
