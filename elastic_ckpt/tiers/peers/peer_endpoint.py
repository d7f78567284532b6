"""One peer's agent as its clients see it: connections that are kept, and trust in none.

A connection that breaks is made anew, and a transfer goes on where it stopped, some
times. A peer that sends nothing or far too little, or that cannot be reached, is
skipped for a while: calls in that time fail at once.

A peer that takes connections and sends nothing is slow, and probably busy. Callers that
have nobody else to ask are patient: they wait four time-outs for its answer, and ask it
while others skip it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import bandwidth, peer_connection, protocol

# The waits before a transfer without any progress is tried again. Not before the first:
# a connection that was kept may have been closed long ago.
RETRY_SECS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
# The longest of these waits for an address that refuses connections: an agent that is
# started anew usually has another address.
_MOST_REFUSED_SECS = 0.2
# How long a peer is left alone after it has failed, in time-outs.
_SKIPPED_TIMEOUTS = 3
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/[0-9]{1,18}")
_SIZE = re.compile(r"[0-9]{1,18}")
_REFUSED = 401
# An agent has taken a repair, or does not and explains why.
_DONE, _CONFLICT = 204, 409
_MOST_REASON_BYTES = 1000
_STATUS = {
    404: "has no such file",
    416: "has a shorter file",
}
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """How this process communicates with all peers.

    Attributes:
      secret: returns the run's current secret.
      needs_tls: whether a peer without it is refused.
      timeout_secs: without a byte, or with far too few.
      max_connections: to one peer at a time.
      bandwidth_bound: shared by all transfers; None without a bound.
    """

    secret: Callable[[], str]
    needs_tls: bool
    timeout_secs: float
    max_connections: int
    bandwidth_bound: bandwidth.Bandwidth | None

    @property
    def skipped_secs(self) -> float:
        """How long a peer is left alone after it has failed."""
        return _SKIPPED_TIMEOUTS * self.timeout_secs

    def wait_secs(self, *, is_patient: bool) -> float:
        """How long to wait for an answer."""
        return self.timeout_secs + (self.skipped_secs if is_patient else 0)


class _Skipped(NamedTuple):
    # Until when a peer is left alone, why, whether it is only slow, and whether it
    # has not even answered a patient caller.
    until_secs: float
    reason: str
    is_slow: bool
    is_hung: bool


class _UnreachableError(TimeoutError):
    """No connection was made in time."""


class Endpoint:
    """Reads from the agent at `url`; any number of threads may call it.

    Args:
      url: of the agent.
      terms: of this process.
      tls: how its certificate is verified; None if it has none.
      certificate_sha256: of its certificate; None for any that is valid for its name.
    """

    def __init__(
        self,
        url: str,
        terms: Terms,
        *,
        tls: ssl.SSLContext | None,
        certificate_sha256: str | None,
    ) -> None:
        self.url = url
        self._terms = terms
        self._tls = tls
        self._certificate_sha256 = certificate_sha256
        self._free = threading.BoundedSemaphore(terms.max_connections)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._skipped: _Skipped | None = None
        self._refuses_connections = False

    def left_skipped_secs(self) -> float:
        """How long until it is asked again; 0 if it is not skipped."""
        skipped = self._skipped
        left = 0.0 if skipped is None else skipped.until_secs - time.monotonic()
        return max(0.0, left)

    def read(self, path: str, *, most_bytes: int, is_patient: bool = False) -> bytes:
        """The whole answer to `path`.

        Args:
          path: of the file.
          most_bytes: that are taken.
          is_patient: whether to wait for a slow peer.

        Raises:
          ReadError: if it cannot be had, or has more than `most_bytes`.
        """

        def read() -> bytes:
            with self._answer(
                "GET", path, {}, status=200, is_patient=is_patient
            ) as response:
                num_bytes = response.length
                if num_bytes is None or num_bytes > most_bytes:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {num_bytes} bytes, and at"
                        f" most {most_bytes} are taken"
                    )
                content = bytearray()
                while len(content) < num_bytes:
                    content += self._piece(response, num_bytes - len(content))
                return bytes(content)

        return self._persistently(read, lambda: 0, is_patient=is_patient)

    def read_into(
        self,
        path: str,
        offset: int,
        into: memoryview,
        on_piece: source.OnPiece = source.ignored,
        *,
        is_patient: bool = False,
    ) -> None:
        """Fills `into` with bytes of `path` from `offset` on; see `source.Source`.

        Args:
          path: of the file.
          offset: of the first byte.
          into: writable and contiguous.
          on_piece: called with each part of `into`, in order, once it is read.
          is_patient: whether to wait for a slow peer.

        Raises:
          ReadError: if they cannot be had.
        """
        done = 0

        def fill() -> None:
            nonlocal done
            first, last = offset + done, offset + len(into) - 1
            wanted = {"Range": f"bytes={first}-{last}"}
            with self._answer(
                "GET", path, wanted, status=206, is_patient=is_patient
            ) as response:
                self._check_range(response, first, last)
                while done < len(into):
                    piece = into[done : done + self._piece_bytes()]
                    if response.readinto(piece) < len(piece):
                        raise ConnectionError("closed the connection")
                    done += len(piece)
                    on_piece(piece)
                    self._pause(len(piece))

        if len(into):
            self._persistently(fill, lambda: done, is_patient=is_patient)
        else:
            self.size(path, is_patient=is_patient)

    def size(self, path: str, *, is_patient: bool = False) -> int:
        """The length of the file at `path` in bytes.

        Args:
          path: of the file.
          is_patient: whether to wait for a slow peer.

        Raises:
          ReadError: if it cannot be had.
        """

        def look() -> int:
            with self._answer(
                "HEAD", path, {}, status=200, is_patient=is_patient
            ) as response:
                announced = response.getheader("Content-Length", "")
            if not _SIZE.fullmatch(announced):
                raise source.ReadError(
                    f"cannot be read: {self.url} gives its size as {announced!r:.40}"
                )
            return int(announced)

        return self._persistently(look, lambda: 0, is_patient=is_patient)

    def put(self, path: str, content: bytes) -> None:
        """Sends a file that replaces a bad copy at `path`; tried once.

        Raises:
          RepairError: if the agent does not take it.
        """
        problem = self._problem()
        if problem is not None:
            raise source.RepairError(str(problem))
        with self._free:
            connection = self._new_connection()
            try:
                connection.request(
                    "PUT", path, body=content, headers=self._own_headers()
                )
                response = connection.getresponse()
                reason = response.read(_MOST_REASON_BYTES).decode(errors="replace")
            except (
                OSError,
                peer_connection.UntrustedError,
                http.client.HTTPException,
            ) as error:
                # An agent of an earlier version ends the connection.
                raise source.RepairError(
                    f"was not repaired: {self.url} does not take it"
                    f" ({type(error).__name__})"
                ) from None
            finally:
                connection.close()
        if response.status == _CONFLICT:
            raise source.RepairError(reason)
        if response.status != _DONE:
            raise source.RepairError(
                f"was not repaired: {self.url} answers with status {response.status}"
            )

    def retry_refused(self) -> None:
        """Has the peer asked again if it is skipped because it refused connections.

        For one that has the same address after it was started again. A refusal takes
        no time, unlike other failures.
        """
        if self._refuses_connections:
            self._skipped, self._refuses_connections = None, False

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _persistently(
        self,
        attempt: Callable[[], Result],
        progress: Callable[[], int],
        *,
        is_patient: bool,
    ) -> Result:
        waits = iter(RETRY_SECS)
        while True:
            before = progress()
            try:
                outcome = attempt()
            except (
                _UnreachableError,
                ssl.SSLCertVerificationError,
                peer_connection.UntrustedError,
            ) as error:
                raise self._failed(str(error)) from None
            except TimeoutError as error:
                raise self._slow(str(error), is_patient=is_patient) from None
            except OSError as error:
                # Idle connections are as old as the broken one.
                self.close()
                if progress() > before:
                    waits = iter(RETRY_SECS)
                wait = next(waits, None)
                refused = isinstance(error, ConnectionRefusedError)
                if wait is None or (refused and wait > _MOST_REFUSED_SECS):
                    raise self._failed(str(error), refused=refused) from None
                time.sleep(wait)
            except http.client.HTTPException as error:
                # The message is left out, because it may contain the secret.
                reason = f"does not speak HTTP: {type(error).__name__}"
                raise self._failed(reason) from None
            else:
                self._skipped = None
                return outcome

    def _failed(self, reason: str, *, refused: bool = False) -> source.ReadError:
        self._refuses_connections = refused
        self._skip(reason)
        return source.ReadError(f"cannot be read: {self.url} fails ({reason})")

    def _slow(self, reason: str, *, is_patient: bool) -> source.SlowError:
        self._refuses_connections = False
        self._skip(reason, is_slow=True, is_hung=is_patient)
        return source.SlowError(f"cannot be read: {self.url} fails ({reason})")

    def _skip(
        self, reason: str, *, is_slow: bool = False, is_hung: bool = False
    ) -> None:
        until_secs = time.monotonic() + self._terms.skipped_secs
        self._skipped = _Skipped(until_secs, reason, is_slow, is_hung)

    def _problem(self, *, is_patient: bool = False) -> source.ReadError | None:
        # Why the peer is not asked now.
        if self._terms.needs_tls and not self.url.startswith("https://"):
            return source.ReadError(
                f"was not asked for: {self.url} does not encrypt, and this run does"
            )
        skipped = self._skipped
        if skipped is None or skipped.until_secs <= time.monotonic():
            return None
        if is_patient and skipped.is_slow and not skipped.is_hung:
            return None
        kind = source.SlowError if skipped.is_slow else source.ReadError
        return kind(
            f"was not asked for: {self.url} has failed ({skipped.reason}), and is left"
            f" alone for {self._terms.skipped_secs:g} s"
        )

    def _own_headers(self) -> dict[str, str]:
        return {
            protocol.HEADER: str(protocol.VERSION),
            "Authorization": f"Bearer {self._terms.secret()}",
        }

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        status: int,
        is_patient: bool,
    ) -> Iterator[peer_connection.Response]:
        """The response to a request; its connection is kept if its body was read."""
        with self._free:
            problem = self._problem(is_patient=is_patient)
            if problem is not None:
                raise problem
            connection = self._connection()
            try:
                _connect(connection)
                assert connection.sock is not None
                wait_secs = self._terms.wait_secs(is_patient=is_patient)
                connection.sock.settimeout(wait_secs)
                connection.request(
                    method, path, headers={**headers, **self._own_headers()}
                )
                response = connection.getresponse()
                assert isinstance(response, peer_connection.Response)
                if problem := protocol.problem(response.getheader(protocol.HEADER)):
                    raise source.ReadError(f"cannot be read: {self.url} {problem}")
                if response.status == _REFUSED:
                    raise source.RefusedError(
                        f"cannot be read: {self.url} does not take the run's secret"
                    )
                if response.status != status:
                    status_text = f"answers with status {response.status}"
                    raise source.ReadError(
                        f"cannot be read: {self.url}"
                        f" {_STATUS.get(response.status, status_text)}"
                    )
                yield response
                response.close()
            except BaseException:
                connection.close()
                raise
            with self._lock:
                self._idle.append(connection)

    def _connection(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._new_connection()

    def _new_connection(self) -> http.client.HTTPConnection:
        return peer_connection.connection(
            self.url,
            timeout_secs=self._terms.timeout_secs,
            tls=self._tls,
            certificate_sha256=self._certificate_sha256,
        )

    def _check_range(
        self, response: peer_connection.Response, first: int, last: int
    ) -> None:
        match = _RANGE.fullmatch(response.getheader("Content-Range", ""))
        bounds = (int(match[1]), int(match[2])) if match else None
        if bounds == (first, last) and response.length == last + 1 - first:
            return
        raise source.ReadError(
            f"cannot be read: {self.url} sends {response.length} bytes, range"
            f" {bounds}, for the bytes {first}-{last}"
        )

    def _piece(self, response: peer_connection.Response, left: int) -> bytes:
        piece = response.read(min(left, self._piece_bytes()))
        if not piece:
            raise ConnectionError("closed the connection")
        self._pause(len(piece))
        return piece

    def _piece_bytes(self) -> int:
        # The most that is lost when a connection breaks.
        bound = self._terms.bandwidth_bound
        return bound.piece_bytes(source.PIECE_BYTES) if bound else source.PIECE_BYTES

    def _pause(self, num_bytes: int) -> None:
        if bound := self._terms.bandwidth_bound:
            time.sleep(bound.take(num_bytes))


def _connect(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        return
    try:
        connection.connect()
    except TimeoutError as error:
        # With a socket, the peer has taken the connection, and has not encrypted it.
        if connection.sock is None:
            raise _UnreachableError(str(error)) from None
        raise
