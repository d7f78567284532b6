"""The link between two supervisors: JSON over a connection whose peers share a key.

The machine that leads listens on a port and writes its address and a new key into its
claim; the others connect and identify themselves first. Messages are JSON, so nothing
is unpickled. Each side sends four empty messages per `lost_secs`, the time after which
a silent peer is lost.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import secrets
import socket
import struct
import threading
import time
from multiprocessing import connection
from typing import Any

_BEATS = 4
# The pause between attempts to accept a peer.
_PAUSE_SECS = 0.1


class LinkLostError(Exception):
    """The other supervisor, or the connection to it, is gone; the message says why."""


class Link:
    """A link to another supervisor; `send` may be called from any thread.

    Args:
      channel: a connection to a peer that has proved that it knows the key.
      lost_secs: the time after which a silent peer is lost.
      hello: the peer's description of itself; empty if this side connected.
    """

    def __init__(
        self,
        channel: connection.Connection,
        lost_secs: float,
        hello: dict[str, Any],
    ) -> None:
        self.channel, self.hello = channel, hello
        self._lost_secs = lost_secs
        self._heard_secs = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Sends a message; if the link is lost, only `receive` raises."""
        with self._lock, contextlib.suppress(OSError):
            self.channel.send_bytes(json.dumps(message).encode())

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived, without waiting.

        Raises:
          LinkLostError: if the link is lost and all messages have been received.
        """
        messages = []
        try:
            while self.channel.poll():
                messages.append(json.loads(self.channel.recv_bytes()))
                self._heard_secs = time.monotonic()
        except (EOFError, OSError) as error:
            if not messages:
                raise LinkLostError(str(error) or "it closed the connection") from None
        except ValueError as error:
            raise LinkLostError(f"it sent something other than JSON: {error}") from None
        if time.monotonic() - self._heard_secs > self._lost_secs:
            raise LinkLostError("it stopped responding")
        return [each for each in messages if each]

    def close(self) -> None:
        """Closes the link."""
        self._ended.set()
        with self._lock:
            self.channel.close()

    def _beat(self) -> None:
        while not self._ended.wait(self._lost_secs / _BEATS):
            self.send()


class Listener:
    """Accepts links on a port of this machine that the OS chooses.

    Args:
      interface: the address at which the other machines reach this one.
      lost_secs: see `Link`.

    Attributes:
      address: `host:port`.
      key: the key that peers must know.
      accepted: the links to peers that know the key.
    """

    def __init__(self, interface: str, lost_secs: float) -> None:
        self.lost_secs = lost_secs
        self._socket = socket.create_server((interface, 0), backlog=128)
        self.address = f"{interface}:{self._socket.getsockname()[1]}"
        self.key = secrets.token_hex(32)
        self.accepted: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="listener")
        self._accepting.start()

    def close(self) -> None:
        """Stops accepting and closes the links that nobody has taken."""
        self._ended.set()
        with contextlib.suppress(OSError):
            # Wakes the thread; closing the socket would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._socket.close()
        self._drop()

    def _drop(self) -> None:
        while not self.accepted.empty():
            self.accepted.get().close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                # The machine may be out of file descriptors for a while.
                self._ended.wait(_PAUSE_SECS)
                continue
            # A silent peer must not keep others waiting.
            threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _admit(self, accepted: socket.socket) -> None:
        channel = _as_connection(accepted, self.lost_secs)
        try:
            connection.deliver_challenge(channel, self.key.encode())
            connection.answer_challenge(channel, self.key.encode())
            hello = dict(json.loads(channel.recv_bytes()))
        except (EOFError, OSError, ValueError, multiprocessing.AuthenticationError):
            channel.close()
            return
        self.accepted.put(Link(channel, self.lost_secs, hello))
        if self._ended.is_set():
            self._drop()


def connect(address: str, key: str, lost_secs: float, **hello: Any) -> Link:
    """Connects to the listener at `address`; both sides prove that they know the key.

    Raises:
      LinkLostError: if the connection fails; its cause is a ConnectionRefusedError if
        nothing listens at the address.
    """
    host, _, port = address.rpartition(":")
    try:
        reached = socket.create_connection((host, int(port)), timeout=lost_secs)
        channel = _as_connection(reached, lost_secs)
        connection.answer_challenge(channel, key.encode())
        connection.deliver_challenge(channel, key.encode())
        channel.send_bytes(json.dumps(hello).encode())
    except (EOFError, OSError, multiprocessing.AuthenticationError) as error:
        raise LinkLostError(str(error) or "it closed the connection") from error
    return Link(channel, lost_secs, {})


def _as_connection(connected: socket.socket, secs: float) -> connection.Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A frozen peer keeps its connections open.
    limit = struct.pack("ll", int(secs), round(secs % 1 * 1e6))
    for each in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, each, limit)
    return connection.Connection(connected.detach())
