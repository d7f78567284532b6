"""Copies of a step on backup hosts: host 0 places them, and backup hosts fetch them.

A backup host has no accelerator and is in no world (`refill`). Placement gives
it parts as it does hosts of the world, with one difference: the backup hosts are one
failure domain, so that one copy of each part is there, wherever else it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.checkpoint.host import refill
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.steps import part_choices, part_message, placement
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.peers import backup_directory
from elastic_ckpt.tiers.source import ReadError, RepairError

_MOST_MACHINE_BYTES = 4096
_POLL_SECS = 0.1
# The time for a backup host to fetch its part of a step.
_LEAST_SECS = 30.0
_BYTES_PER_SEC = 2**24


class BackupCopies:
    """Host 0's part in copies on backup hosts, one step at a time.

    Args:
      world: with the urls of backup hosts.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        # By url: the backup hosts that fetch parts of the step, and until when.
        self._fetching: dict[str, float] = {}
        self._problems: list[str] = []

    def send(self, message: PartMessage) -> None:
        """Has backup hosts fetch the parts of a step that they lack.

        Args:
          message: the parts of the step at all hosts, of one step.
        """
        self._fetching, self._problems = {}, []
        hosts = self._hosts()
        (table,) = message.tables
        tables = placed(table, self._world.hosts, list(hosts.values()))
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

    def await_taken(self, step_id: StepId) -> list[str]:
        """Returns when backup hosts have their parts, or why they do not."""
        while self._fetching:
            for url, deadline_secs in list(self._fetching.items()):
                backup = self._world.peer_at(url)
                if step_id in backup.known_saves():
                    del self._fetching[url]
                elif backup.problems:
                    del self._fetching[url]
                    self._problems.append(
                        f"the backup host at {url} has not fetched its parts of step"
                        f" {step_id.step}: {backup.problems[0]}"
                    )
                elif time.monotonic() > deadline_secs:
                    del self._fetching[url]
                    self._problems.append(
                        f"the backup host at {url} has not fetched its parts of step"
                        f" {step_id.step} in time; look at its output"
                    )
            time.sleep(_POLL_SECS if self._fetching else 0)
        problems, self._problems = self._problems, []
        return problems

    def _hosts(self) -> dict[str, Host]:
        # The backup hosts that can be reached, by url.
        hosts = {}
        for url in self._world.peers.backups:
            endpoint = self._world.client.endpoint(url)
            # One that was started again has the same address.
            endpoint.retry_refused()
            try:
                content = endpoint.read("/v1/machine", most_bytes=_MOST_MACHINE_BYTES)
                machine = str(json.loads(content)["machine"])
            except (ReadError, ValueError, KeyError, TypeError) as error:
                self._problems.append(f"the backup host at {url} {error}")
                continue
            number = len(self._world.hosts) + len(hosts)
            hosts[url] = refill.backup_host(machine, number=number)
        return hosts

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
        self._fetching[url] = time.monotonic() + secs


def placed(
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
    policy = placement.Policy(copies=1 if backups else 0, domain=refill.KIND)
    everyone = [*hosts, *backups]
    copies = placement.place(holdings, everyone, policy)
    return part_choices.of_copies(table, holdings, copies, everyone)
