"""Passes reports up a tree of hosts to host 0, and a step's table down to all hosts.

    offer      each host waits for the hosts below it, then offers their report with its
               own
    merged     on host 0, the merged report of all hosts
    post       host 0 posts a message for all hosts
    take       each host waits for the host above it, then takes host 0's message and
               passes it on

All hosts finish one of these calls before any host begins the next. A host reads at
most `FAN_IN` messages from hosts below it and one from the host above it, however many
hosts there are. If a host's agent does not answer, the hosts below or above it are
asked instead, so only that host's own parts are missing.

Messages are files in `hosts/<slot>/messages/` on the RAM disks, which agents serve like
steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from etils import epath

from elastic_ckpt.core import background, checked_blobs, codec, storage
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Host, Manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.peers.peer_client import Endpoint
from elastic_ckpt.tiers.ram.ram_disk import MESSAGES, RamDisk
from elastic_ckpt.tiers.source import ReadError

T = TypeVar("T")
_VERSION = 1
_MOST_BYTES = 2**31
_REPORT = "exchange-report"
# Host 0's message in a restore.
GIVEN = "exchange-given"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The manifests that hosts have, and the problems found.

    Attributes:
      manifests: step manifests, merged for all holders with the same contents.
      problems: a message for each manifest or message that could not be read.
      refusing: the URLs of agents that reject the run's secret.
      silent: the indices of hosts whose reports could not be read.
    """

    manifests: Sequence[Manifest] = ()
    problems: Sequence[str] = ()
    saves: Sequence[StepId] = ()
    refusing: Sequence[str] = ()
    silent: Sequence[int] = ()

    @classmethod
    def merged(cls, reports: Sequence[Report]) -> Report:
        """Merges reports."""
        groups = manifest.grouped(_joined(each.manifests for each in reports))
        return cls(
            manifests=[Manifest.merged(group) for group in groups],
            problems=_joined(each.problems for each in reports),
            saves=sorted(set(_joined(each.saves for each in reports))),
            refusing=_joined(each.refusing for each in reports),
            silent=_joined(each.silent for each in reports),
        )

    def to_bytes(self) -> bytes:
        """Encodes the report for `parse`."""
        rest: Any = codec.encode(dataclasses.replace(self, manifests=()))
        blobs = [each.to_bytes() for each in self.manifests]
        return checked_blobs.to_bytes(rest, blobs, version=_VERSION)

    @classmethod
    def parse(cls, content: bytes) -> Report:
        """Decodes what `to_bytes` encoded.

        Raises:
          ValueError: if `content` is not a report.
        """
        fields, blobs = checked_blobs.parse(content, what="report", version=_VERSION)
        rest = codec.decode(cls, fields, name="the report")
        return dataclasses.replace(rest, manifests=[*map(Manifest.parse, blobs)])


class Exchange:
    """One host's messages, and its side of exchanges with all hosts, one at a time.

    Args:
      endpoint: a function that takes the ID of a machine in the world and returns the
        machine's agent.

    Attributes:
      merged: on host 0, the merged reports of all hosts.
    """

    def __init__(
        self,
        disk: RamDisk,
        *,
        hosts: Sequence[Host],
        number: int,
        endpoint: Callable[[str], Endpoint],
    ) -> None:
        self._disk, self._hosts, self._number = disk, hosts, number
        self._endpoint, self._tree = endpoint, HostTree(num_hosts=len(hosts))
        self.merged = Report()

    def post(self, name: str, content: bytes) -> None:
        """Leaves a message, replacing any message with the same name."""
        storage.write_atomic(self._messages(self._number) / name, content)

    def read(self, host: int, name: str) -> bytes:
        """Reads a host's message.

        Raises:
          ReadError: if the message does not exist, or the host cannot be reached.
        """
        there = self._hosts[host]
        if there.machine != self._disk.machine:
            path = f"/hosts/{there.slot}/{MESSAGES}/{name}"
            return self._endpoint(there.machine).read(path, most_bytes=_MOST_BYTES)
        path = self._messages(host) / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise ReadError(f"cannot be read: {path} is missing") from None

    def remove(self, prefix: str) -> None:
        """Removes this host's messages whose names begin with `prefix`."""
        # The directory stays: another exchange may be about to post there.
        for path in self._messages(self._number).glob(f"{prefix}*"):
            storage.remove(path)

    def offer(self, report: Report) -> None:
        """Offers the manifests of this host and of the hosts below it."""
        report = self._with_below(report, self._number)
        if self._number:
            self.post(_REPORT, report.to_bytes())
        else:
            self.merged = report

    def take(self, name: str) -> bytes:
        """Takes a message that host 0 has posted and passes it on.

        Raises:
          ReadError: if no host above has the message.
        """
        problem = ReadError("was not passed on")
        for above in reversed(self._tree.way(self._number)[:-1]):
            try:
                content = self.read(above.start, name)
            except ReadError as error:
                problem = error
                continue
            if self._tree.children(self._number):
                self.post(name, content)
            return content
        raise problem

    def end(self) -> None:
        """Removes the messages of an exchange."""
        self.merged = Report()
        self.remove("exchange-")

    def _with_below(self, report: Report, host: int) -> Report:
        with background.pool(FAN_IN, "reports") as pool:
            below = pool.map(self._of, self._tree.children(host))
            return Report.merged([report, *below])

    def _of(self, host: int) -> Report:
        # A host's own report or, if it cannot be read, the reports of the hosts below.
        try:
            return Report.parse(self.read(host, _REPORT))
        except (ReadError, ValueError) as error:
            problem = f"the list of host {host}'s parts {error}"
            return self._with_below(Report(problems=[problem], silent=[host]), host)

    def _messages(self, host: int) -> epath.Path:
        return self._disk.host_directory(int(self._hosts[host].slot)) / MESSAGES


def _joined(several: Iterable[Iterable[T]]) -> list[T]:
    return [each for some in several for each in some]
