"""A host's part in making copies: host 0 places them, and each host takes its own.

Copies of a step go through `offer`, `place`, `pass_on` (see `part_exchange`),
and `take`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ckpt.checkpoint.host import part_offers, replication
from elastic_ckpt.checkpoint.host.answers import Placed, Replicated
from elastic_ckpt.checkpoint.host.part_exchange import Letter
from elastic_ckpt.checkpoint.host.world import HostWorld, not_in_ram
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps import owners, part_choices
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId


class HostCopies:
    """Makes the copies that one host takes.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._part_exchange = world.exchanges["copies"]

    @calls.call(order="up")
    def offer(self, step_id: StepId) -> tuple[Letter, ...]:
        """Offers what this host has of a step; see `PartExchange.offer`."""
        return self._part_exchange.offer(part_offers.of_save(self._world, step_id))

    @calls.call()
    def place(self, step_id: StepId) -> Placed:
        """Places the copies of a step, and compares replicas; host 0 does it.

        Raises:
          CheckpointError: if nothing of the step can be read.
        """
        message = self._part_exchange.merged()
        if message.of_save(step_id) is None:
            raise errors.CheckpointError(not_in_ram(step_id.step, message.problems))
        world = self._world
        placed, tables = placed_parts(message, world.hosts, world.copy_policy)
        self._part_exchange.deal(tables)
        return placed

    @calls.call(limit_secs=calls.LONG_SECS)
    def take(self, step_id: StepId) -> Replicated:
        """Takes the copies that placement gives this host.

        Raises:
          CheckpointError: if copies do not fit.
        """
        try:
            tables = part_offers.received(self._part_exchange, step_id)
        except errors.CheckpointError as error:
            taken = Replicated(problems=(str(error),))
        else:
            taken = self.fetch(tables)
        return dataclasses.replace(
            taken,
            preserved=tuple(self._world.disk.kept()),
            failed=bool(taken.problems),
        )

    def fetch(self, tables: Sequence[PartTable]) -> Replicated:
        """Fetches copies of parts, and writes them to this host's RAM disk.

        Args:
          tables: of one step, those at the senders first.

        Raises:
          CheckpointError: if they do not fit.
        """
        sources = part_offers.sources(self._world, tables)
        return replication.fetch(self._world.own, sources)


def placed_parts(
    message: PartMessage, hosts: Sequence[Host], policy: owners.Policy
) -> tuple[Placed, tuple[PartTable, PartTable]]:
    """Places the copies of a step; returns the result, and what each host takes.

    Args:
      message: the parts of the step at all hosts, of one step.
      hosts: of the world, by number.
      policy: how many copies, and where.

    Raises:
      CheckpointError: if hosts list different contents of the step.
    """
    offers = [offer for table in message.tables for offer in table.offers()]
    holdings = Holdings.from_offers(offers)
    (table,) = message.tables
    diverged = [_diverged(holdings, int(item)) for item in holdings.diverged]
    placed = _placed(holdings, hosts, policy)
    summary = Placed(
        problems=(*message.problems, *diverged, *placed.shortfalls),
        diverged=tuple(diverged),
        failed=bool(message.problems),
        num_machines=placed.num_machines,
    )
    return summary, part_choices.of_copies(table, holdings, placed, hosts)


def _placed(
    holdings: Holdings, hosts: Sequence[Host], policy: owners.Policy
) -> owners.Placement:
    sets = holdings.holder_sets(hosts)
    return owners.Owners(hosts, policy).place(sets, holdings.stored_bytes)


def _diverged(holdings: Holdings, item: int) -> str:
    hosts = ", ".join(sorted(offer.host.id for offer in holdings.holders(item)))
    return (
        f"{holdings.name(item)} has different values at the hosts {hosts}: a device or"
        " memory of one of them is faulty, and the step does not count as complete"
    )
