"""Reports pass up a tree of hosts to host 0, and a step's table down to all of them.

    offer      each host, after those below it, offers what it and they hold
    merged     host 0 has what all hosts hold
    give       host 0 gives all hosts something
    take       each host, after the one above it, takes and passes on what host 0 gives

All hosts finish one of these before any begins the next. A host reads at most `FAN_IN`
messages of hosts below it and one of the host above it, however many hosts there are.
If the agent of a host does not answer, the hosts around it are asked in its place: only
what it holds itself is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

from elastic_ckpt.core import background, checked_blobs, checked_json, codec
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.peers.mailbox import Mailbox
from elastic_ckpt.tiers.source import ReadError

T = TypeVar("T")
_VERSION = 1
_REPORT = "report"
# What host 0 gives in a restore.
GIVEN = "given"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What hosts have.

    Attributes:
      manifests: of steps, one for all holders that list the same.
      problems: manifests and messages that could not be read, a sentence each.
      saves: steps with their saves.
      refusing: the urls of agents that do not take the run's secret.
    """

    manifests: Sequence[Manifest] = ()
    problems: Sequence[str] = ()
    saves: Sequence[StepId] = ()
    refusing: Sequence[str] = ()

    @classmethod
    def merged(cls, reports: Sequence[Report]) -> Report:
        """All that several reports contain."""
        groups = manifest.grouped(_joined(each.manifests for each in reports))
        return cls(
            manifests=[Manifest.merged(group) for group in groups],
            problems=_joined(each.problems for each in reports),
            saves=sorted(set(_joined(each.saves for each in reports))),
            refusing=_joined(each.refusing for each in reports),
        )

    def to_bytes(self) -> bytes:
        """Encodes it; `parse` reads that."""
        fields = {
            "problems": list(self.problems),
            "saves": codec.encode(list(self.saves)),
            "refusing": list(self.refusing),
        }
        blobs = [each.to_bytes() for each in self.manifests]
        return checked_blobs.to_bytes(fields, blobs, version=_VERSION)

    @classmethod
    def parse(cls, content: bytes) -> Report:
        """The report that `to_bytes` encoded.

        Raises:
          UnreadableError: if it is something else.
        """
        fields, blobs = checked_blobs.parse(content, what="report", version=_VERSION)
        try:
            return cls(
                manifests=[Manifest.parse(blob) for blob in blobs],
                problems=codec.decode(list[str], fields["problems"]),
                saves=codec.decode(list[StepId], fields["saves"]),
                refusing=codec.decode(list[str], fields["refusing"]),
            )
        except KeyError as error:
            raise checked_json.UnreadableError(f"is not a report ({error})") from None


class Exchange:
    """One host's part in exchanges, one at a time.

    Args:
      mail: of this host.
      host: the number of this host.
      num_hosts: of the world.

    Attributes:
      merged: on host 0, what all hosts have offered.
    """

    def __init__(self, mail: Mailbox, *, host: int, num_hosts: int) -> None:
        self._mail = mail
        self._host = host
        self._tree = HostTree(num_hosts=num_hosts)
        self.merged = Report()

    def offer(self, report: Report) -> None:
        """Offers what this host and those below it hold."""
        children = self._tree.children(self._host)
        if children:
            with background.pool(FAN_IN, "reports") as pool:
                below = list(pool.map(self._of, children))
            report = Report.merged([report, *below])
        if self._host:
            self._mail.post(_REPORT, report.to_bytes())
        else:
            self.merged = report

    def give(self, name: str, content: bytes) -> None:
        """Gives all hosts something, by a name; host 0 does it."""
        self._mail.post(name, content)

    def take(self, name: str) -> bytes:
        """What host 0 gives by a name, which this host passes on.

        Raises:
          ReadError: if no host above has it.
        """
        problem = ReadError("was not given")
        for above in reversed(self._tree.way(self._host)[:-1]):
            try:
                content = self._mail.read(above.start, name)
            except ReadError as error:
                problem = error
                continue
            if self._tree.children(self._host):
                self._mail.post(name, content)
            return content
        raise problem

    def end(self) -> None:
        """Removes the messages of this host."""
        self.merged = Report()
        self._mail.remove(_REPORT)
        self._mail.remove(GIVEN)

    def _of(self, host: int) -> Report:
        # What a host has offered; or else what those below it have.
        try:
            return Report.parse(self._mail.read(host, _REPORT))
        except (ReadError, checked_json.UnreadableError) as error:
            problem = f"the parts of host {host}: the list {error}"
            children = self._tree.children(host)
            return Report.merged([Report(problems=[problem]), *map(self._of, children)])


def _joined(several: Iterable[Iterable[T]]) -> list[T]:
    return [each for some in several for each in some]
