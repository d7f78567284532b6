"""Parts pass up a tree of hosts to the one that decides, and its answers down again.

    offer      each host offers what it holds
    merge      the hosts of one level after the other, the deepest first, merge what is
               offered below them
    merged     host 0 has the parts of all
    deal       host 0 gives each host its parts
    pass_on    the hosts of one level after the other, the first first, pass on what is
               for hosts below them
    received   each host has its parts

All hosts finish one of these before any begins the next. A host reads at most `FAN_IN`
messages of hosts below it and one of the host above it, however many hosts there are.

`merge` and `pass_on` return the messages that could not be read. Their writers are
alive, only their machines' agents do not answer: the driver asks the hosts themselves
for these messages (`HostWorld.forward_mail`), delivers them, and repeats the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from elastic_ckpt.core import background, checked_json
from elastic_ckpt.core.host_tree import HostTree
from elastic_ckpt.steps import part_message
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.tiers.peers.mailbox import Mailbox
from elastic_ckpt.tiers.source import ReadError

FAN_IN = 22
# Exchanges are about copies that hosts take, shares of a backup, or reads of a restore.
Kind = Literal["copies", "backup", "restore"]
KINDS: tuple[Kind, ...] = ("copies", "backup", "restore")
_THREADS = 8


def tree_of(num_hosts: int) -> HostTree:
    """The tree of a world."""
    return HostTree(num_hosts=num_hosts, fan_in=FAN_IN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letter:
    """A message of one host to another.

    Attributes:
      writer: the number of the host that has left it.
      reader: the number of the host that it is for.
      name: of the message.
    """

    writer: int
    reader: int
    name: str


class PartExchange:
    """One host's part in exchanges of one kind, one at a time.

    Args:
      mail: of this host.
      kind: of the exchanges.
      host: the number of this host.
      num_hosts: of the world.
    """

    def __init__(self, mail: Mailbox, kind: Kind, *, host: int, num_hosts: int) -> None:
        self._mail = mail
        self._kind = kind
        self._host = host
        self._tree = tree_of(num_hosts)
        self._offered = PartMessage()
        # What hosts below this one offer, as far as it was read.
        self._read: dict[int, PartMessage] = {}
        # On host 0, what all hosts offer.
        self._merged: PartMessage | None = None
        self._own: PartMessage | None = None
        # Why this host has no parts.
        self._problem = "was not received"

    def offer(self, message: PartMessage) -> None:
        """Offers the parts that this host holds; drops the exchange before."""
        self.end()
        self._offered = message
        if self._host and not self._tree.children(self._host):
            self._post("offered", message)

    def merge(self, level: int) -> tuple[Letter, ...]:
        """Offers what is offered below this host, too, if it is on that level.

        Returns:
          The messages that could not be read; their parts are not offered.
        """
        children = self._tree.children(self._host)
        if self._tree.level(self._host) != level or not children:
            return ()
        unread = [child for child in children if child not in self._read]
        if not unread:
            return ()
        problems: dict[int, PartMessage] = {}
        with background.pool(_THREADS, "offers") as pool:
            for child, problem in zip(
                unread, pool.map(self._read_offer, unread), strict=True
            ):
                if problem is not None:
                    problems[child] = problem
        read = self._read | problems
        messages = [self._offered, *(read[child] for child in children)]
        merged = PartMessage.merged(messages)
        if self._host:
            self._post("offered", merged)
        else:
            self._merged = merged
        name = f"{self._kind}-offered"
        return tuple(
            Letter(writer=child, reader=self._host, name=name) for child in problems
        )

    def merged(self) -> PartMessage:
        """The parts that all hosts offer; on host 0."""
        return self._offered if self._merged is None else self._merged

    def deal(self, tables: Sequence[PartTable]) -> None:
        """Gives the hosts below this one their parts, and keeps those of this host."""
        children = self._tree.children(self._host)
        group = np.full(self._tree.num_hosts, -1)
        group[self._host] = 0
        for number, child in enumerate(children, 1):
            group[self._tree.below(child)] = number
        groups = [table.for_groups(group, len(children) + 1) for table in tables]
        own, *others = (
            PartMessage(tables=tuple(of_group[number] for of_group in groups))
            for number in range(len(children) + 1)
        )
        self._own = own
        for child, message in zip(children, others, strict=True):
            self._post(f"parts-{child}", message)

    def pass_on(self, level: int) -> tuple[Letter, ...]:
        """Takes the parts of this host, if it is on that level, and of those below it.

        Returns:
          The message with them if it could not be read. Then `received` fails on all of
          these hosts.
        """
        parent = self._tree.parent(self._host)
        is_on_level = self._tree.level(self._host) == level
        if parent is None or not is_on_level or self._own is not None:
            return ()
        name = f"{self._kind}-parts-{self._host}"
        try:
            message = part_message.parse(self._mail.read(parent, name))
        except (ReadError, checked_json.UnreadableError) as error:
            self._problem = str(error)
            return (Letter(writer=parent, reader=self._host, name=name),)
        if self._tree.children(self._host):
            self.deal(message.tables)
        else:
            self._own = message
        return ()

    def received(self) -> Sequence[PartTable]:
        """The parts of this host.

        Raises:
          ReadError: if they could not be read.
        """
        # The host above has read it.
        self._mail.remove(f"{self._kind}-offered")
        own, self._own = self._own, None
        if own is None:
            raise ReadError(self._problem)
        return own.tables

    def end(self) -> None:
        """Removes the messages of this host."""
        self._own, self._merged, self._offered = None, None, PartMessage()
        self._read = {}
        self._problem = "was not received"
        self._mail.remove(f"{self._kind}-")

    def _read_offer(self, child: int) -> PartMessage | None:
        # Returns what is lacking if it cannot be read.
        try:
            content = self._mail.read(child, f"{self._kind}-offered")
            self._read[child] = part_message.parse(content)
            return None
        except (ReadError, checked_json.UnreadableError) as error:
            below = len(self._tree.below(child)) - 1
            more = f" and of the {below} below it" if below else ""
            problem = f"the parts of host {child}{more}: the list {error}"
            return PartMessage(problems=(problem,), is_partial=True)

    def _post(self, name: str, message: PartMessage) -> None:
        self._mail.post(f"{self._kind}-{name}", part_message.to_bytes(message))
