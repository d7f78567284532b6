"""The HTTP client of a process for the agents of other machines, and trust in none.

Connections are kept, by urllib3. One that breaks is made anew, and a transfer goes on
where it stopped, some times. A peer that sends nothing or far too little, or that
cannot be reached, is skipped for a while: calls in that time fail at once.

A peer that takes connections and sends nothing is slow, and probably busy. Callers that
have nobody else to ask are patient: they wait four time-outs for its answer, and ask it
while others skip it.

`http.client` waits as long as a byte comes now and then, and reads header after header.
Here a response ends in an error when nothing comes for a while, when what comes is too
little over a while, and when headers do not end. No redirects are followed, and the
environment's proxies are ignored.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import urllib3
from etils import epath
from urllib3 import connection, exceptions

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import bandwidth, protocol

# The waits before a transfer without any progress is tried again. Not before the first:
# a connection that was kept may have been closed long ago.
RETRY_SECS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
# A slower response counts as no response.
LEAST_BYTES_PER_SEC = 64 * 2**10
# The longest of the waits for an address that refuses connections: an agent that is
# started anew usually has another address.
_MOST_REFUSED_SECS = 0.2
# How long a peer is left alone after it has failed, in time-outs.
_SKIPPED_TIMEOUTS = 3
_MOST_HEADER_BYTES = 64 * 2**10
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/[0-9]{1,18}")
_SIZE = re.compile(r"[0-9]{1,18}")
_REFUSED = 401
# An agent has taken a repair, or does not and explains why.
_DONE, _CONFLICT = 204, 409
_MOST_REASON_BYTES = 1000
_STATUS = {404: "has no such file", 416: "has a shorter file"}
# urllib3 raises its own, and those of `http.client` while a body is read.
_FAILURES = (OSError, http.client.HTTPException, exceptions.HTTPError)
Result = TypeVar("Result")
Content = TypeVar("Content", bytes, memoryview)


class PeerClient:
    """Reads from the agents of other machines; one a process, for any thread.

    Args:
      secret: the run's, or a function that returns the current one.
      tls_ca: a PEM file with the authority that signs the agents' certificates; with
        it, agents without TLS are refused. Without it, the system's authorities.
      timeout_secs: a peer that sends nothing for so long, or far too little, fails,
        and is left alone for three times as long. Where nobody else has what it has,
        it is waited for as long.
      max_connections: to one peer at a time.
      max_bytes_per_sec: from all peers together; None without a bound.

    Raises:
      ConfigError: if `tls_ca` cannot be read.

    Attributes:
      secret: returns the run's current secret.
      needs_tls: whether agents without TLS are refused.
      timeout_secs: as given.
      max_connections: as given.
      bound: of all transfers; None without.
    """

    def __init__(
        self,
        secret: str | Callable[[], str],
        *,
        tls_ca: epath.PathLike | None = None,
        timeout_secs: float = 10.0,
        max_connections: int = 4,
        max_bytes_per_sec: float | None = None,
    ) -> None:
        self.secret = (lambda: secret) if isinstance(secret, str) else secret
        self.needs_tls = tls_ca is not None
        self.timeout_secs = timeout_secs
        self.max_connections = max_connections
        self.bound = None
        if max_bytes_per_sec:
            self.bound = bandwidth.Bandwidth(max_bytes_per_sec)
        self._tls = None if tls_ca is None else _tls(tls_ca)
        self._endpoints: dict[str, Endpoint] = {}

    def endpoint(self, url: str) -> Endpoint:
        """The agent at `url`, one object however often it is asked for.

        Args:
          url: of an agent.
        """
        if self._tls is None and url.startswith("https://"):
            # Made once: to read the system's authorities takes longer than a request.
            self._tls = _tls(None)
        made = Endpoint(url, self, tls=self._tls)
        return self._endpoints.setdefault(url, made)

    def left_skipped_secs(self) -> float:
        """How long until all peers that have failed are asked again."""
        endpoints = list(self._endpoints.values())
        return max((each.left_skipped_secs() for each in endpoints), default=0.0)

    def close(self) -> None:
        """Closes all idle connections; the client is of no use then."""
        for endpoint in list(self._endpoints.values()):
            endpoint.close()


class _Skipped(NamedTuple):
    # Until when a peer is left alone, and why: whether it is only slow, has not even
    # answered a patient caller, or refuses connections.
    until_secs: float
    reason: str
    is_slow: bool
    is_hung: bool
    is_refused: bool


class Endpoint:
    """Reads from the agent at `url`; any number of threads may call it.

    Args:
      url: of the agent, whose certificate is for the name or address in it.
      client: of this process, with what holds for all agents.
      tls: how its certificate is verified.

    Attributes:
      url: of the agent.
    """

    def __init__(
        self, url: str, client: PeerClient, *, tls: ssl.SSLContext | None
    ) -> None:
        self.url = url
        self._client = client
        self._skipped_secs = _SKIPPED_TIMEOUTS * client.timeout_secs
        self._free = threading.BoundedSemaphore(client.max_connections)
        self._skipped: _Skipped | None = None
        parsed = urllib.parse.urlsplit(self.url)
        host, port = parsed.hostname or "", parsed.port
        self._pool: urllib3.HTTPConnectionPool
        if parsed.scheme == "https":
            self._pool = urllib3.HTTPSConnectionPool(
                host,
                port,
                maxsize=client.max_connections,
                ssl_context=tls,
            )
            self._pool.ConnectionCls = _EncryptedConnection  # type: ignore[assignment]
        else:
            self._pool = urllib3.HTTPConnectionPool(
                host, port, maxsize=client.max_connections
            )
            self._pool.ConnectionCls = _PlainConnection  # type: ignore[assignment]

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
            with self._answer("GET", path, is_patient=is_patient) as response:
                num_bytes = response.length
                if num_bytes is None or num_bytes > most_bytes:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {num_bytes} bytes, and at"
                        f" most {most_bytes} are taken"
                    )
                content = b"".join(map(response.read, self._pieces(num_bytes)))
                return _checked(content, num_bytes)

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
            with self._answer(
                "GET", path, wanted=f"bytes={first}-{last}", is_patient=is_patient
            ) as response:
                self._check_range(response, first, last)
                for num_bytes in self._pieces(len(into) - done):
                    part = into[done : done + num_bytes]
                    _checked(part[: response.readinto(part)], num_bytes)
                    done += num_bytes
                    on_piece(part)

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
            with self._answer("HEAD", path, is_patient=is_patient) as response:
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
        try:
            with self._response("PUT", path, body=content) as response:
                reason = response.read(_MOST_REASON_BYTES)
        except source.ReadError as error:
            raise source.RepairError(str(error)) from None
        except _FAILURES as error:
            # An agent of an earlier version ends the connection.
            raise source.RepairError(
                f"was not repaired: {self.url} does not take it"
                f" ({type(_cause(error)).__name__})"
            ) from None
        if response.status == _CONFLICT:
            raise source.RepairError(reason.decode(errors="replace"))
        if response.status != _DONE:
            raise source.RepairError(
                f"was not repaired: {self.url} answers with status {response.status}"
            )

    def close(self) -> None:
        """Closes the idle connections; the agent is not asked any more."""
        self._pool.close()

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
            except _FAILURES as error:
                cause = _cause(error)
                if isinstance(error, TimeoutError | exceptions.ReadTimeoutError):
                    raise self._failed(
                        cause, source.SlowError, is_hung=is_patient
                    ) from None
                if not _is_broken(cause):
                    raise self._failed(cause) from None
                if progress() > before:
                    waits = iter(RETRY_SECS)
                wait = next(waits, None)
                refused = isinstance(cause, ConnectionRefusedError)
                if wait is None or (refused and wait > _MOST_REFUSED_SECS):
                    raise self._failed(cause, is_refused=refused) from None
                time.sleep(wait)
            else:
                self._skipped = None
                return outcome

    def _failed(
        self,
        cause: BaseException,
        kind: type[source.ReadError] = source.ReadError,
        *,
        is_hung: bool = False,
        is_refused: bool = False,
    ) -> source.ReadError:
        reason = str(cause)
        if isinstance(cause, http.client.HTTPException):
            # The message is left out, because it may contain the secret.
            reason = f"does not speak HTTP: {type(cause).__name__}"
        self._skipped = _Skipped(
            until_secs=time.monotonic() + self._skipped_secs,
            reason=reason,
            is_slow=kind is source.SlowError,
            is_hung=is_hung,
            is_refused=is_refused,
        )
        return kind(f"cannot be read: {self.url} fails ({reason})")

    def _problem(self, *, is_patient: bool) -> source.ReadError | None:
        # Why the peer is not asked now.
        if self._client.needs_tls and not self.url.startswith("https://"):
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
            f" alone for {self._skipped_secs:g} s"
        )

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        wanted: str | None = None,
        is_patient: bool = False,
    ) -> Iterator[_Response]:
        """The response to a request; its connection is kept if its body was read."""
        headers = {} if wanted is None else {"Range": wanted}
        wait_secs = self._client.timeout_secs + (
            self._skipped_secs if is_patient else 0
        )
        with self._free:
            problem = self._problem(is_patient=is_patient)
            if problem is not None:
                raise problem
            response: Any = self._pool.urlopen(
                method,
                path,
                body=body,
                headers={
                    protocol.HEADER: str(protocol.VERSION),
                    "Authorization": f"Bearer {self._client.secret()}",
                    **headers,
                },
                timeout=urllib3.Timeout(
                    connect=self._client.timeout_secs, read=wait_secs
                ),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            # That of `http.client`, which reads into memory that is there: urllib3 has
            # it read into new memory, and copies that.
            inner = response._original_response
            try:
                yield inner
            finally:
                # One with bytes that were not read is of no more use.
                (response if inner.length != 0 else inner).close()
                response.release_conn()

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        *,
        wanted: str | None = None,
        is_patient: bool,
    ) -> Iterator[_Response]:
        """The response of an agent that gives what was asked for."""
        with self._response(
            method, path, wanted=wanted, is_patient=is_patient
        ) as response:
            problem = protocol.problem(response.getheader(protocol.HEADER))
            if problem is not None:
                raise source.ReadError(f"cannot be read: {self.url} {problem}")
            if response.status == _REFUSED:
                raise source.RefusedError(
                    f"cannot be read: {self.url} does not take the run's secret"
                )
            if response.status != (200 if wanted is None else 206):
                status_text = f"answers with status {response.status}"
                raise source.ReadError(
                    f"cannot be read: {self.url}"
                    f" {_STATUS.get(response.status, status_text)}"
                )
            yield response

    def _check_range(self, response: _Response, first: int, last: int) -> None:
        match = _RANGE.fullmatch(response.getheader("Content-Range", ""))
        bounds = (int(match[1]), int(match[2])) if match else None
        num_bytes = response.length
        if bounds == (first, last) and num_bytes == last + 1 - first:
            return
        raise source.ReadError(
            f"cannot be read: {self.url} sends {num_bytes} bytes, range"
            f" {bounds}, for the bytes {first}-{last}"
        )

    def _pieces(self, num_bytes: int) -> Iterator[int]:
        # How much to read at once: the most that is lost when a connection breaks.
        piece_bytes, bound = source.PIECE_BYTES, self._client.bound
        if bound is not None:
            piece_bytes = bound.piece_bytes(piece_bytes)
        while num_bytes:
            piece = min(piece_bytes, num_bytes)
            yield piece
            num_bytes -= piece
            if bound is not None:
                time.sleep(bound.take(piece))


class _Watched(io.RawIOBase):
    """The bytes of a response, as long as they come and come fast enough."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._raw = connection.makefile("rb", buffering=0)
        self._patience_secs = connection.gettimeout() or math.inf
        # Waking for each packet takes twice the processor time on both machines, so a
        # body is read in pieces. A piece is small enough to arrive in time at the
        # lowest rate; the system does not count the bytes that TLS unpacks.
        piece_bytes = min(
            source.PIECE_BYTES, LEAST_BYTES_PER_SEC * self._patience_secs / 2
        )
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


class _Response(http.client.HTTPResponse):
    """A response whose bytes are watched."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._watched = _Watched(sock)
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        super().begin()
        if self._watched.ended:
            raise ConnectionError("closed the connection")
        # urllib3 would log them, and what a peer sends may be the secret.
        if self.msg.defects or self.msg.get_payload():
            raise http.client.HTTPException("malformed headers")
        self._watched.allowed = math.inf


class _PlainConnection(connection.HTTPConnection):
    response_class = _Response


class _EncryptedConnection(connection.HTTPSConnection):
    response_class = _Response


def _tls(authority: epath.PathLike | None) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise errors.ConfigError(
            f"the certificates of peers cannot be verified with {authority}"
            f" ({error}); give a PEM file with that of their authority"
        ) from None
    return made


def _checked(content: Content, num_bytes: int) -> Content:
    if len(content) < num_bytes:
        raise ConnectionError("closed the connection")
    return content


def _cause(error: Exception) -> BaseException:
    # What urllib3 has wrapped.
    inner = error.__cause__ or (error.args[-1] if error.args else None)
    return inner if isinstance(inner, BaseException) else error


def _is_broken(cause: BaseException) -> bool:
    # A connection that was made, or may be made now, unlike one to a wrong peer.
    if isinstance(cause, TimeoutError | ssl.SSLCertVerificationError):
        return False
    return isinstance(cause, OSError)
