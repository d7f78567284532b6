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
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent import futures
from typing import Literal

import numpy as np

from elastic_ckpt.core import checked_json
from elastic_ckpt.core.host_tree import HostTree
from elastic_ckpt.manifests import part_message
from elastic_ckpt.manifests.part_message import PartMessage
from elastic_ckpt.manifests.part_table import PartTable
from elastic_ckpt.tiers.peers.mailbox import Mail
from elastic_ckpt.tiers.source import ReadError

FAN_IN = 22
# Exchanges are about copies that hosts take, shares of a backup, or reads of a restore.
Kind = Literal["copies", "backup", "restore"]
KINDS: tuple[Kind, ...] = ("copies", "backup", "restore")
_THREADS = 8


def tree_of(num_hosts: int) -> HostTree:
    """The tree of a world."""
    return HostTree(num_hosts=num_hosts, fan_in=FAN_IN)


class PartExchange:
    """One host's part in exchanges of one kind, one at a time.

    Args:
      mail: of this host.
      kind: of the exchanges.
      host: the number of this host.
      num_hosts: of the world.
    """

    def __init__(self, mail: Mail, kind: Kind, *, host: int, num_hosts: int) -> None:
        self._mail = mail
        self._kind = kind
        self._host = host
        self._tree = tree_of(num_hosts)
        self._offered = PartMessage()
        self._own: PartMessage | None = None

    def offer(self, message: PartMessage) -> None:
        """Offers the parts that this host holds; drops the exchange before."""
        self.end()
        self._offered = message
        if self._host and not self._tree.children(self._host):
            self._post("offered", message)

    def merge(self, level: int) -> None:
        """Offers what is offered below this host, too, if it is on that level."""
        if self._tree.level(self._host) == level and self._tree.children(self._host):
            self._post("offered", self.merged())
            self._offered = PartMessage()

    def merged(self) -> PartMessage:
        """The parts that this host and those below it offer."""
        children = self._tree.children(self._host)
        if not children:
            return self._offered
        with futures.ThreadPoolExecutor(_THREADS, "offers") as pool:
            messages = [self._offered, *pool.map(self._offered_by, children)]
        return PartMessage.merged(messages)

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

    def pass_on(self, level: int) -> None:
        """Passes on what is for hosts below this one, if it is on that level.

        If the host above cannot be reached, `received` fails on all of these hosts.
        """
        if self._tree.level(self._host) == level and self._tree.children(self._host):
            with contextlib.suppress(ReadError, checked_json.UnreadableError):
                self.deal(self._from_parent().tables)

    def received(self) -> Sequence[PartTable]:
        """The parts of this host.

        Raises:
          UnreadableError: if the message is not one.
          ReadError: if the host above cannot be reached.
        """
        # The host above has read it.
        self._mail.remove(f"{self._kind}-offered")
        own, self._own = self._own, None
        return (self._from_parent() if own is None else own).tables

    def end(self) -> None:
        """Removes the messages of this host."""
        self._own, self._offered = None, PartMessage()
        self._mail.remove(f"{self._kind}-")

    def _offered_by(self, child: int) -> PartMessage:
        try:
            content = self._mail.read(child, f"{self._kind}-offered")
            return part_message.parse(content)
        except (ReadError, checked_json.UnreadableError) as error:
            below = len(self._tree.below(child)) - 1
            more = f" and of the {below} below it" if below else ""
            problem = f"the parts of host {child}{more}: the list {error}"
            return PartMessage(problems=(problem,), is_partial=True)

    def _from_parent(self) -> PartMessage:
        parent = self._tree.parent(self._host)
        assert parent is not None
        name = f"{self._kind}-parts-{self._host}"
        return part_message.parse(self._mail.read(parent, name))

    def _post(self, name: str, message: PartMessage) -> None:
        self._mail.post(f"{self._kind}-{name}", part_message.to_bytes(message))
