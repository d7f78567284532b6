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
    protocol: asyncio.BaseProtocol
    has_shown_secret: bool = False

    def end(self) -> None:
        # Its server, or its handshake, then reads the end of it, and closes it.
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
        self._open: list[_Connection] = []

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
                connection = _Connection(
                    socket=accepted, client=address[0], protocol=self._make_protocol()
                )
                self._open.append(connection)
                loop.call_later(SECRET_WITHIN_SECS, self._end_stranger, connection)
                beginning.create_task(self._begin(connection))

    def has_shown_secret(self, protocol: asyncio.BaseProtocol) -> None:
        """Notes that the client of a connection, by its protocol, has the secret."""
        for connection in self._open:
            if connection.protocol is protocol:
                connection.has_shown_secret = True

    def _has_room(self, client: str) -> bool:
        # Closed sockets leave the list.
        self._open = [each for each in self._open if each.socket.fileno() >= 0]
        of_client = [each for each in self._open if each.client == client]
        for those, most in (
            (of_client, self._most_of_client),
            (self._open, self._most),
        ):
            if len(those) < most:
                continue
            strangers = (each for each in those if not each.has_shown_secret)
            oldest = next(strangers, None)
            if oldest is None:
                return False
            oldest.end()
            self._open.remove(oldest)
        return True

    def _end_stranger(self, connection: _Connection) -> None:
        if not connection.has_shown_secret:
            connection.end()

    async def _begin(self, connection: _Connection) -> None:
        # The kernel ends what a client leaves lying for as long.
        patience = {"ssl_handshake_timeout": SECRET_WITHIN_SECS} if self._tls else {}
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PATIENCE_SECS * 1000)
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection.protocol,
                connection.socket,
                ssl=self._tls,
                **patience,
            )
