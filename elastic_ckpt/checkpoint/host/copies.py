"""A host's part in making copies: host 0 places them, and each host takes its own.

Copies of a step go through `offer`, `place`, `pass_on` (see `part_exchange`),
and `take`.

Host 0 also places copies on backup hosts, which have no accelerators, are in no world,
and fetch their parts themselves (`refill`). Placement gives them parts as it does hosts
of the world, with one difference: the backup hosts are one failure domain, so that one
copy of each part is there, wherever else it is.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.checkpoint.host import part_offers, refill, replication
from elastic_ckpt.checkpoint.host.answers import Placed, Replicated
from elastic_ckpt.checkpoint.host.part_exchange import Letter
from elastic_ckpt.checkpoint.host.world import HostWorld, not_in_ram
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps import owners, part_choices, part_message
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.peers import backup_directory
from elastic_ckpt.tiers.source import ReadError, RepairError

_MOST_MACHINE_BYTES = 2**16
_POLL_SECS = 0.1
# The time for a backup host to fetch its part of a step.
_LEAST_SECS = 30.0
_BYTES_PER_SEC = 2**24


class HostCopies:
    """Makes the copies that one host takes; on host 0, also those on backup hosts.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._part_exchange = world.exchanges["copies"]
        # By url: the backup hosts that fetch parts of the step.
        self._fetching: dict[str, _Fetch] = {}
        self._problems: list[str] = []

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
        if not world.peers.backups:
            return placed
        self._send(*message.tables)
        if not placed.num_machines:
            return placed
        # One of them has a copy of each part, or `take` says why not.
        return dataclasses.replace(placed, num_machines=placed.num_machines + 1)

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
        problems = (*self._await_backups(step_id), *taken.problems)
        return dataclasses.replace(
            taken,
            problems=problems,
            preserved=tuple(self._world.disk.preserved()),
            failed=bool(problems),
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

    def _send(self, table: PartTable) -> None:
        # Has backup hosts fetch the parts of a step that they lack, of all parts.
        self._fetching, self._problems = {}, []
        hosts = self._backup_hosts()
        tables = on_backups(table, self._world.hosts, list(hosts.values()))
        # Backup hosts are numbered after those of the world.
        num_hosts = len(self._world.hosts)
        group = np.maximum(np.arange(-num_hosts, len(hosts)), -1)
        of_groups = [each.for_groups(group, len(hosts)) for each in tables]
        requests = {
            url: parts
            for url, *parts in zip(hosts, *of_groups, strict=True)
            if any(len(each) or each.files for each in parts)
        }
        keep = self._complete_saves(list(requests))
        for url, parts in requests.items():
            urls = self._world.agent_urls
            addressed = tuple(each.with_urls(urls) for each in parts)
            self._request(url, PartMessage(tables=addressed, saves=keep))

    def _await_backups(self, step_id: StepId) -> list[str]:
        # Returns when backup hosts have their parts, or why they do not.
        while self._fetching:
            for url, fetch in list(self._fetching.items()):
                backup = self._world.peer_at(url)
                if step_id not in backup.known_saves():
                    problems = [*backup.problems, *self._refusals(url, fetch.request)]
                    if time.monotonic() > fetch.until_secs:
                        problems.append("its time is over; look at its output")
                    if not problems:
                        continue
                    self._problems.append(
                        f"the backup host at {url} has not fetched its parts of step"
                        f" {step_id.step}: {problems[0]}"
                    )
                del self._fetching[url]
            time.sleep(_POLL_SECS if self._fetching else 0)
        problems, self._problems = self._problems, []
        return problems

    def _backup_hosts(self) -> dict[str, Host]:
        # The backup hosts that can be reached, by url.
        hosts = {}
        for url in self._world.peers.backups:
            endpoint = self._world.client.endpoint(url)
            # One that was started again has the same address.
            endpoint.retry_refused()
            try:
                machine = str(self._facts(url)["machine"])
            except (ReadError, ValueError, KeyError, TypeError) as error:
                self._problems.append(f"the backup host at {url} {error}")
                continue
            number = len(self._world.hosts) + len(hosts)
            hosts[url] = refill.backup_host(machine, number=number)
        return hosts

    def _refusals(self, url: str, request: str) -> list[str]:
        # Why a backup host could not do what a request asks for; none if it may yet.
        try:
            refused = self._facts(url)["refused"]
            return [str(refused["why"])] if refused["request"] == request else []
        except (ReadError, ValueError, KeyError, TypeError):
            return []

    def _facts(self, url: str) -> dict[str, Any]:
        endpoint = self._world.client.endpoint(url)
        content = endpoint.read("/v1/machine", most_bytes=_MOST_MACHINE_BYTES)
        return dict(json.loads(content))

    def _complete_saves(self, urls: Sequence[str]) -> tuple[StepId, ...]:
        # The newest save of which each backup host has its parts.
        saves = [set(self._world.peer_at(url).known_saves()) for url in urls]
        common = set.intersection(*saves) if saves else set()
        newest = max(common, key=refill.order, default=None)
        return () if newest is None else (newest,)

    def _request(self, url: str, message: PartMessage) -> None:
        content = part_message.to_bytes(message)
        try:
            self._world.client.endpoint(url).put(backup_directory.URL_PATH, content)
        except RepairError as error:
            self._problems.append(f"the backup host at {url} takes no request: {error}")
            return
        num_bytes = sum(int(np.sum(each.stored_bytes)) for each in message.tables)
        secs = _LEAST_SECS + num_bytes / _BYTES_PER_SEC
        self._fetching[url] = _Fetch(
            request=backup_directory.name_of(content),
            until_secs=time.monotonic() + secs,
        )


class _Fetch(NamedTuple):
    # The request that a backup host has got, and when its time is over.
    request: str
    until_secs: float


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


def on_backups(
    table: PartTable, hosts: Sequence[Host], backups: Sequence[Host]
) -> tuple[PartTable, PartTable]:
    """The parts that backup hosts fetch: one copy of each that none of them has.

    Args:
      table: of all parts of a step.
      hosts: of the world, by number.
      backups: whose numbers follow those of the world.

    Returns:
      The parts at their senders, and at other holders, for the number of each target.
    """
    holdings = Holdings.from_offers(table.offers())
    policy = owners.Policy(copies=1 if backups else 0, domain=refill.KIND)
    everyone = [*hosts, *backups]
    copies = _placed(holdings, everyone, policy)
    return part_choices.of_copies(table, holdings, copies, everyone)


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
