"""The connections of an agent: so many in all, so many from each address.

They are counted before anything is read from them, TLS handshakes included. Connections
that have not shown the run's secret take no room from those that will: they are closed
after a few seconds, and earlier if another client needs their place. One connection too
many is closed at once, and its client tries again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import Callable

# The time that a client which has shown the secret has for each of its actions: sending
# the next request, or reading a response.
PATIENCE_SECS = 30.0
# The time that a client has to show the secret, its TLS handshake included.
SECRET_WITHIN_SECS = 5.0
# The pause after running out of descriptors, until other files are closed.
_BREATH_SECS = 0.1


@dataclasses.dataclass(kw_only=True, eq=False)
class _Connection:
    socket: socket.socket
    client: str
    has_shown_secret: bool = False

    def end_stranger(self) -> None:
        # Its server, or its handshake, then reads the end of it, and closes it.
        if not self.has_shown_secret:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """Accepts connections and hands them to a server, until it is cancelled.

    Args:
      make_protocol: of a connection, as asyncio's servers take it.
      tls: how to encrypt, or None.
      most: connections at a time.
      most_of_client: connections at a time from one address.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None,
        most: int,
        most_of_client: int,
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        self._most = most
        self._most_of_client = most_of_client
        # The oldest first.
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}

    async def accept(self, listening: socket.socket) -> None:
        """Serves the clients that connect to `listening`, which does not block."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as beginning:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except OSError:
                    await asyncio.sleep(_BREATH_SECS)
                    continue
                if not self._has_room(address[0]):
                    accepted.close()
                    continue
                connection = _Connection(socket=accepted, client=address[0])
                protocol = self._make_protocol()
                self._open[protocol] = connection
                loop.call_later(SECRET_WITHIN_SECS, connection.end_stranger)
                beginning.create_task(self._begin(accepted, protocol))

    def has_shown_secret(self, protocol: asyncio.BaseProtocol) -> None:
        """Notes that the client of a connection, by its protocol, has the secret."""
        if protocol in self._open:
            self._open[protocol].has_shown_secret = True

    def _has_room(self, client: str) -> bool:
        # Closed sockets leave the list.
        self._open = {p: c for p, c in self._open.items() if c.socket.fileno() >= 0}
        return self._end_oldest(self._most_of_client, client) and self._end_oldest(
            self._most, None
        )

    def _end_oldest(self, most: int, client: str | None) -> bool:
        # Whether there are fewer connections, without the oldest one of a stranger.
        those = [p for p, c in self._open.items() if client in (None, c.client)]
        if len(those) < most:
            return True
        strangers = (p for p in those if not self._open[p].has_shown_secret)
        oldest = next(strangers, None)
        if oldest is not None:
            self._open.pop(oldest).end_stranger()
        return oldest is not None

    async def _begin(
        self, accepted: socket.socket, protocol: asyncio.BaseProtocol
    ) -> None:
        # The kernel ends what a client leaves lying for as long.
        patience = {"ssl_handshake_timeout": SECRET_WITHIN_SECS} if self._tls else {}
        with contextlib.suppress(OSError):
            accepted.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PATIENCE_SECS * 1000)
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, **patience
            )
