"""The connections of an agent: so many in all, so many from each address.

They are counted before anything is read from them, TLS handshakes included; one too
many is closed at once, and its client tries again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

# What a client may take for each step of its own: a handshake, a request, reading what
# it asked for.
PATIENCE_SECS = 30.0
# Files that cannot be opened, for want of descriptors: others are closed meanwhile.
_BREATH_SECS = 0.1


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
        self._open: list[tuple[socket.socket, str]] = []

    async def accept(self, listening: socket.socket) -> None:
        """Serves whoever connects to `listening`, which does not block."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as beginning:
            while True:
                try:
                    connection, address = await loop.sock_accept(listening)
                except OSError:
                    await asyncio.sleep(_BREATH_SECS)
                    continue
                if self._admits(address[0]):
                    self._open.append((connection, address[0]))
                    beginning.create_task(self._begin(connection))
                else:
                    connection.close()

    def _admits(self, client: str) -> bool:
        # Whoever closes a socket takes it off the list by that.
        self._open = [each for each in self._open if each[0].fileno() >= 0]
        of_client = sum(other == client for _, other in self._open)
        return len(self._open) < self._most and of_client < self._most_of_client

    async def _begin(self, connection: socket.socket) -> None:
        # The kernel ends what a client leaves lying for as long.
        patience = {"ssl_handshake_timeout": PATIENCE_SECS} if self._tls else {}
        with contextlib.suppress(OSError):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PATIENCE_SECS * 1000)
            )
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, **patience
            )
