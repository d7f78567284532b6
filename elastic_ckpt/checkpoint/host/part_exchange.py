"""Parts pass up a tree of hosts to the one that decides, and its answers down again.

    offer      each host, after those below it, offers what it and they hold
    merged     host 0 has the parts of all
    deal       host 0 gives each host its parts
    pass_on    each host, after the one above it, takes its parts, and passes on those
               of hosts below it
    received   each host has its parts

All hosts finish one of these before any begins the next. A host reads at most `FAN_IN`
messages of hosts below it and one of the host above it, however many hosts there are.

`offer` and `pass_on` return the messages that could not be read. Their writers are
alive, only their machines' agents do not answer: the driver asks the hosts themselves
for these messages (`HostWorld.forward_mail`), delivers them, and has all hosts `merge`
again what is offered, or `pass_on`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from elastic_ckpt.core import background, checked_json
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps import part_message
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.tiers.peers.mailbox import Mailbox
from elastic_ckpt.tiers.source import ReadError

# Exchanges are about copies that hosts take, shares of a backup, or reads of a restore.
Kind = Literal["copies", "backup", "restore"]
KINDS: tuple[Kind, ...] = ("copies", "backup", "restore")


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
        self._tree = HostTree(num_hosts=num_hosts)
        # What this host offers alone; and on host 0, what all hosts offer.
        self._offered = PartMessage()
        self._merged = PartMessage()
        self._own: PartMessage | None = None
        # Why this host has no parts.
        self._problem = "was not received"

    def offer(self, message: PartMessage) -> tuple[Letter, ...]:
        """Offers the parts that this host and those below it hold.

        Drops the exchange before.

        Args:
          message: the parts that this host holds.

        Returns:
          The messages that could not be read; their parts are not offered.
        """
        self.end()
        self._offered = message
        return self.merge()

    def merge(self) -> tuple[Letter, ...]:
        """Reads again what hosts below this one offer; returns as `offer`."""
        children = self._tree.children(self._host)
        merged, unread = self._offered, []
        if children:
            with background.pool(FAN_IN, "offers") as pool:
                offers = list(pool.map(self._read_offer, children))
            merged = PartMessage.merged([self._offered, *(each for each, _ in offers)])
            unread = [letter for _, letter in offers if letter is not None]
        if self._host:
            self._post("offered", merged)
        else:
            self._merged = merged
        return tuple(unread)

    def merged(self) -> PartMessage:
        """The parts that all hosts offer; on host 0."""
        return self._merged

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

    def pass_on(self) -> tuple[Letter, ...]:
        """Takes the parts of this host, and passes on those of hosts below it.

        Returns:
          The message with them if it could not be read. Then `received` fails on all of
          these hosts.
        """
        if not self._host or self._own is not None:
            return ()
        parent = self._tree.way(self._host)[-2].start
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
        self._own = None
        self._offered = self._merged = PartMessage()
        self._problem = "was not received"
        self._mail.remove(f"{self._kind}-")

    def _read_offer(self, child: int) -> tuple[PartMessage, Letter | None]:
        # If it cannot be read, returns what is lacking, and the message.
        name = f"{self._kind}-offered"
        try:
            return part_message.parse(self._mail.read(child, name)), None
        except (ReadError, checked_json.UnreadableError) as error:
            below = len(self._tree.below(child)) - 1
            more = f" and of the {below} below it" if below else ""
            problem = f"the parts of host {child}{more}: the list {error}"
            return (
                PartMessage(problems=(problem,), is_partial=True),
                Letter(writer=child, reader=self._host, name=name),
            )

    def _post(self, name: str, message: PartMessage) -> None:
        self._mail.post(f"{self._kind}-{name}", part_message.to_bytes(message))
