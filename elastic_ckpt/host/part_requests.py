"""Requests by which parts pass up the tree of hosts and down again."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping

from elastic_ckpt.host.part_exchange import Kind, Letter
from elastic_ckpt.host.world_requests import AnyHost
from elastic_ckpt.tiers.source import ReadError

# Their columns are much alike, and speed counts.
_COMPRESSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfExchange:
    """The field of requests that exchanges of several kinds send at the same time.

    Attributes:
      kind: of the exchange.
    """

    kind: Kind

    @property
    def channel(self) -> str:
        """See `phases.channel`."""
        return f"{type(self).__name__}/{self.kind}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeParts(_OfExchange):
    """Merges what is offered below the hosts of a level.

    Attributes:
      level: of the tree of hosts.
    """

    level: int

    def run(self, host: AnyHost) -> tuple[Letter, ...]:
        """See `PartExchange.merge`."""
        return host.tiers.world.exchanges[self.kind].merge(self.level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassParts(_OfExchange):
    """Has the hosts of a level take their parts, and those of the hosts below them.

    Attributes:
      level: of the tree of hosts.
    """

    level: int

    def run(self, host: AnyHost) -> tuple[Letter, ...]:
        """See `PartExchange.pass_on`."""
        return host.tiers.world.exchanges[self.kind].pass_on(self.level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forwarded:
    """The part of a host in what agents did not send.

    Attributes:
      messages: by name, compressed.
      urls: by the id of its machine, an agent that serves it now.
    """

    messages: Mapping[str, bytes]
    urls: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardMail(_OfExchange):
    """Asks hosts for messages that their machines' agents did not send.

    The first host of such a machine starts another agent, for what is read later.

    Attributes:
      letters: that could not be read.
    """

    letters: tuple[Letter, ...]

    def run(self, host: AnyHost) -> Forwarded:
        """See `Mail.read` and `HostWorld.serve_beside`."""
        world = host.tiers.world
        messages = {}
        for letter in self.letters:
            if letter.writer == world.number:
                with contextlib.suppress(ReadError):
                    content = world.mail.read(world.number, letter.name)
                    messages[letter.name] = zlib.compress(content, _COMPRESSION)
        writers = {world.hosts[letter.writer].id for letter in self.letters}
        machine = world.disk.machine
        url: str | None = None
        if machine in {i.rpartition(".")[0] for i in writers}:
            url = world.serve_beside()
        return Forwarded(messages=messages, urls={} if url is None else {machine: url})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeliverMail(_OfExchange):
    """Delivers what `ForwardMail` returned.

    Attributes:
      letters: that could not be read.
      forwarded: by each host, by number.
    """

    letters: tuple[Letter, ...]
    forwarded: tuple[Forwarded, ...]

    def run(self, host: AnyHost) -> None:
        """See `Mail.deliver` and `HostWorld.use_agents`."""
        world = host.tiers.world
        for each in self.forwarded:
            world.use_agents(each.urls)
        for letter in self.letters:
            content = self.forwarded[letter.writer].messages.get(letter.name)
            if letter.reader == world.number and content is not None:
                world.mail.deliver(letter.writer, letter.name, zlib.decompress(content))
