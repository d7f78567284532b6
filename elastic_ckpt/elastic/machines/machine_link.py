"""The link of two supervisors: JSON messages over a connection with a shared key.

The leader opens a port, and publishes its address and a new key through the
coordination service of the machines; followers connect. The messages of a link are
bytes of JSON, which are never unpickled.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import secrets
import socket
import threading
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

# The longest time for the leader to accept a connection.
_CONNECT_SECS = 10.0


class LinkLostError(Exception):
    """The other supervisor, or the way to it, is gone."""


class Link:
    """A link to another supervisor; `send` may be called from any thread.

    Args:
      channel: a connection with a peer that has shown the key.
    """

    def __init__(self, channel: connection.Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` has a message."""
        return self._channel.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message; if the link is lost, `receive` raises."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> Mapping[str, Any]:
        """Waits for the next message.

        Raises:
          LinkLostError: if there will be none.
        """
        try:
            return json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            raise LinkLostError from None

    def has_message(self) -> bool:
        """Whether `receive` returns, or raises, at once."""
        return self._channel.poll()

    def cut(self) -> None:
        """Ends the link; a thread in `receive` gets a LinkLostError."""
        with contextlib.suppress(OSError):
            # Closing it would not wake a thread that reads from it.
            duplicate = socket.socket(fileno=self._channel.fileno())
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            finally:
                duplicate.detach()


class Listener:
    """Accepts links at a port of this machine that the OS chooses.

    Args:
      interface: the address by which the other machines reach this one.

    Attributes:
      address: of its port, `host:port`.
      key: that a peer has to show, in hexadecimal digits.
    """

    def __init__(self, interface: str) -> None:
        self._socket = socket.create_server((interface, 0), backlog=128)
        self._socket.setblocking(False)
        self.address = f"{interface}:{self._socket.getsockname()[1]}"
        self.key = secrets.token_hex(32)

    def accept(self) -> connection.Connection | None:
        """A new connection, for `authenticated`; None if there is none now."""
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return None
        accepted.setblocking(True)
        return _as_connection(accepted)

    def authenticated(self, channel: connection.Connection) -> Link:
        """The link of a connection whose peer shows the key; may wait for it.

        Raises:
          LinkLostError: if it does not.
        """
        try:
            connection.deliver_challenge(channel, self.key.encode())
            connection.answer_challenge(channel, self.key.encode())
        except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
            channel.close()
            raise LinkLostError from error
        return Link(channel)

    def close(self) -> None:
        """Accepts no more."""
        self._socket.close()


def connect(address: str, key: str) -> Link:
    """A link to the listener at `address`, which has to show the key, too.

    Raises:
      LinkLostError: if it cannot be had.
    """
    host, _, port = address.rpartition(":")
    try:
        reached = socket.create_connection((host, int(port)), timeout=_CONNECT_SECS)
        reached.settimeout(None)
        channel = _as_connection(reached)
        connection.answer_challenge(channel, key.encode())
        connection.deliver_challenge(channel, key.encode())
    except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
        raise LinkLostError from error
    return Link(channel)


def _as_connection(connected: socket.socket) -> connection.Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection.Connection(connected.detach())
