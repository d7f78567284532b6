"""A connection to a peer that is not trusted: HTTP(S), with an end to all waiting.

`http.client` waits as long as a byte comes now and then, and reads header after header.
Here a response ends in an error when nothing comes for a while, when what comes is too
little over a while, and when headers do not end. No redirects are followed, and the
environment's proxies are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import math
import socket
import ssl
import time
import urllib.parse
from typing import Any

from elastic_ckpt.tiers.source import PIECE_BYTES

# A slower response counts as no response.
LEAST_BYTES_PER_SEC = 64 * 2**10
_MOST_HEADER_BYTES = 64 * 2**10


class UntrustedError(Exception):
    """The peer is not who it should be, as the end of `<url> ...`."""


class _Watched(io.RawIOBase):
    """The bytes of a response, as long as they come and come fast enough."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._raw = connection.makefile("rb", buffering=0)
        self._patience_secs = connection.gettimeout() or math.inf
        # Waking for each packet takes twice the processor time on both machines, so a
        # body is read in pieces. A piece is small enough to arrive in time at the
        # lowest rate; the system does not count the bytes that TLS unpacks.
        piece_bytes = min(PIECE_BYTES, LEAST_BYTES_PER_SEC * self._patience_secs / 2)
        encrypted = isinstance(connection, ssl.SSLSocket)
        self._piece_bytes = 1 if encrypted else max(1, int(piece_bytes))
        # None: the response before this one may have left any.
        self._woken_at: int | None = None
        self._waited_secs = 0.0
        self._received = 0
        # How many more there may be, and whether there are no more.
        self.allowed: float = _MOST_HEADER_BYTES
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if self.allowed <= 0:
            raise http.client.HTTPException("headers without an end")
        # A buffer takes what there is; a read past it is of a body, which comes in
        # full.
        is_body = len(into) > io.DEFAULT_BUFFER_SIZE
        self._wake_at(min(len(into), self._piece_bytes) if is_body else 1)
        began = time.monotonic()
        try:
            num_bytes = self._raw.readinto(into) or 0
        except TimeoutError as error:
            why = f"sent fewer than {self._woken_at} bytes" if is_body else str(error)
            raise TimeoutError(f"{why} in {self._patience_secs:.1f} s") from None
        self._waited_secs += time.monotonic() - began
        self._received += num_bytes
        self.ended = not num_bytes
        self.allowed -= num_bytes
        if self._waited_secs >= self._patience_secs:
            if self._received < LEAST_BYTES_PER_SEC * self._waited_secs:
                raise TimeoutError(
                    f"sent {self._received} bytes in {self._waited_secs:.1f} s"
                )
            self._waited_secs, self._received = 0.0, 0
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _wake_at(self, num_bytes: int) -> None:
        # How much has to have come before a read returns.
        if num_bytes != self._woken_at:
            # Without this option, bytes are read as they arrive.
            with contextlib.suppress(OSError):
                option = (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
                self._socket.setsockopt(*option, num_bytes)
            self._woken_at = num_bytes


class Response(http.client.HTTPResponse):
    """A response whose body may be read into memory that is there already."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._watched = _Watched(sock)
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        """Reads the headers.

        Raises:
          ConnectionError: if the connection ends before they do.
        """
        super().begin()
        if self._watched.ended:
            raise ConnectionError("closed the connection")
        self._watched.allowed = math.inf


class _EncryptedConnection(http.client.HTTPSConnection):
    """Takes one certificate only, whenever it connects, if that is known."""

    def __init__(
        self,
        host: str,
        port: int | None,
        *,
        certificate_sha256: str | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(host, port, **kwargs)
        self._certificate_sha256 = certificate_sha256

    def connect(self) -> None:
        super().connect()
        if self._certificate_sha256 is None:
            return
        assert isinstance(self.sock, ssl.SSLSocket)
        shown = self.sock.getpeercert(binary_form=True) or b""
        shown_sha256 = hashlib.sha256(shown).hexdigest()
        if shown_sha256 != self._certificate_sha256:
            self.close()
            raise UntrustedError(
                f"shows the certificate {shown_sha256}, not"
                f" {self._certificate_sha256} as announced"
            )


def connection(
    url: str,
    *,
    timeout_secs: float,
    tls: ssl.SSLContext | None,
    certificate_sha256: str | None,
) -> http.client.HTTPConnection:
    """A connection to the peer at `url`, which connects when it is used.

    Args:
      url: `http://` or `https://`, host and port.
      timeout_secs: without a byte, or with less than `LEAST_BYTES_PER_SEC` through.
      tls: how to verify certificates; None for `http://`.
      certificate_sha256: of the only certificate to accept, by whatever name; with
        another, requests raise `UntrustedError`. None for any that is valid.
    """
    parsed = urllib.parse.urlsplit(url)
    host, port = parsed.hostname or "", parsed.port
    made: http.client.HTTPConnection
    if parsed.scheme != "https":
        made = http.client.HTTPConnection(host, port, timeout=timeout_secs)
    else:
        made = _EncryptedConnection(
            host,
            port,
            timeout=timeout_secs,
            context=tls,
            certificate_sha256=certificate_sha256,
        )
    made.response_class = Response
    return made
