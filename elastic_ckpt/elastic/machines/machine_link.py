"""The link of two supervisors: JSON messages over a connection with a shared key.

The leader opens a port, and writes its address and a new key into its claim; followers
connect. The messages of a link are bytes of JSON, which are never unpickled. Both sides
send a beat four times in the time after which one that is not heard of is lost.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

_BEATS = 4


class LinkLostError(Exception):
    """The other supervisor, or the way to it, is gone; the message says why."""


class Link:
    """A link to another supervisor; `send` may be called from any thread.

    Args:
      channel: a connection with a peer that has shown the key.
      lost_secs: the time without a message after which the peer is lost.
    """

    def __init__(self, channel: connection.Connection, lost_secs: float) -> None:
        self._channel = channel
        self._lost_secs = lost_secs
        self._heard_secs = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def begin_beats(self) -> None:
        """Shows the peer, from now on, that this supervisor is alive."""
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether the peer has not been heard of for too long."""
        return time.monotonic() - self._heard_secs > self._lost_secs

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` has a message."""
        return self._channel.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message; if the link is lost, `receive` raises."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> Mapping[str, Any]:
        """Waits for the next message, which may be a beat.

        Raises:
          LinkLostError: if there will be none.
        """
        try:
            message = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError) as error:
            raise LinkLostError(str(error) or "it ended the connection") from error
        self._heard_secs = time.monotonic()
        return message

    def has_message(self) -> bool:
        """Whether `receive` returns, or raises, at once."""
        return self._channel.poll()

    def cut(self) -> None:
        """Ends the link; a thread in `receive` gets a LinkLostError."""
        self._ended.set()
        with contextlib.suppress(OSError):
            # Closing it would not wake a thread that reads from it.
            duplicate = socket.socket(fileno=self._channel.fileno())
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            finally:
                duplicate.detach()

    def _beat(self) -> None:
        while not self._ended.wait(self._lost_secs / _BEATS):
            self.send(beat=True)


class Listener:
    """Accepts links at a port of this machine that the OS chooses.

    Args:
      interface: the address by which the other machines reach this one.
      lost_secs: see `Link`.

    Attributes:
      address: of its port, `host:port`.
      key: that a peer has to show, in hexadecimal digits.
    """

    def __init__(self, interface: str, lost_secs: float) -> None:
        self._lost_secs = lost_secs
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
        return _as_connection(accepted, self._lost_secs)

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
            raise LinkLostError(str(error)) from error
        return Link(channel, self._lost_secs)

    def close(self) -> None:
        """Accepts no more."""
        self._socket.close()


def connect(address: str, key: str, lost_secs: float) -> Link:
    """A link to the listener at `address`, which has to show the key, too.

    Raises:
      LinkLostError: if it cannot be had; by a ConnectionRefusedError, if nothing
        listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        reached = socket.create_connection((host, int(port)), timeout=lost_secs)
        channel = _as_connection(reached, lost_secs)
        connection.answer_challenge(channel, key.encode())
        connection.deliver_challenge(channel, key.encode())
    except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
        raise LinkLostError(str(error) or "it ended the connection") from error
    return Link(channel, lost_secs)


def _as_connection(connected: socket.socket, secs: float) -> connection.Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer that stands still keeps its connections.
    limit = struct.pack("ll", int(secs), round(secs % 1 * 1e6))
    for each in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, each, limit)
    return connection.Connection(connected.detach())
