"""An HTTP client of the agents of other machines, with pooled connections.

A peer is not trusted: what it sends is bounded, callers compare every value with its
digest, and no message has its words. A transfer that breaks continues where it stopped,
some times. A peer that stays silent for the time limit, or cannot be reached, counts as
absent: until three time limits have passed, calls fail at once. No redirects are
followed, and the environment's proxies are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import queue
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TypeVar

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.choices import Peers
from elastic_ckpt.tiers.peers import agent

# The waits before a transfer without any progress is tried again. Not before the first:
# a connection that was kept may have been closed long ago.
RETRY_SECS = (0.0, 0.1, 0.2, 0.4)
# How long a peer that failed is left alone, in time limits.
_SKIPPED_LIMITS = 3
_MOST_CONNECTIONS = 4
_MOST_REASON_BYTES = 1000
_BROKEN = (ConnectionError, ssl.SSLEOFError)
_STATUS = {404: "has no such file", 416: "has a shorter file"}
# Unused bandwidth is kept for this long, so that the limit costs nothing below it, and
# a transfer never takes more at once: others get their turn in between.
_BURST_SECS, _TURN_SECS = 1 / 8, 1 / 32
T = TypeVar("T")


class Bandwidth:
    """A token bucket for all transfers of a process; any thread may call it.

    Args:
      bytes_per_sec: above 0.
      clock: seconds that only grow.
    """

    def __init__(
        self, bytes_per_sec: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.piece_bytes = max(
            1, min(source.PIECE_BYTES, int(bytes_per_sec * _TURN_SECS))
        )
        self._bytes_per_sec, self._clock = bytes_per_sec, clock
        self._lock = threading.Lock()
        # When all that was taken so far will have been paid for.
        self._paid = clock()

    def take(self, num_bytes: int) -> float:
        """Takes `num_bytes`; returns the seconds to wait before the next."""
        with self._lock:
            now = self._clock()
            begin = max(self._paid, now - _BURST_SECS)
            self._paid = begin + num_bytes / self._bytes_per_sec
            return max(0.0, self._paid - now)


class PeerClient:
    """Reads from the agents of other machines; one a process, for any thread.

    Args:
      secret: the run's, or a function that returns the current one.
      tls_ca: a PEM file with the authority that signs the agents' certificates; with
        it, agents without TLS are refused. Without it, the system's authorities.
      timeout_secs: a peer that sends nothing for so long is absent for three times as
        long.
      max_bytes_per_sec: from all peers together; None without a bound.

    Raises:
      ConfigError: if the authority cannot be used.
    """

    def __init__(
        self,
        secret: str | Callable[[], str],
        *,
        tls_ca: epath.PathLike | None = None,
        timeout_secs: float = 10.0,
        max_bytes_per_sec: float | None = None,
    ) -> None:
        self.secret = (lambda: secret) if isinstance(secret, str) else secret
        self.timeout_secs = timeout_secs
        self.bound = Bandwidth(max_bytes_per_sec) if max_bytes_per_sec else None
        self.needs_tls = tls_ca is not None
        self._tls = None if tls_ca is None else _tls(tls_ca)
        self._endpoints: dict[str, Endpoint] = {}

    def endpoint(self, url: str) -> Endpoint:
        """The agent at `url`, one object however often it is asked for."""
        if self._tls is None and url.startswith("https://"):
            # Made once: to read the system's authorities takes longer than a request.
            self._tls = _tls(None)
        return self._endpoints.setdefault(url, Endpoint(url, self, tls=self._tls))

    def left_skipped_secs(self) -> float:
        """How long until all peers that have failed are asked again."""
        skipped = [each.skipped_until for each in list(self._endpoints.values())]
        return max(0.0, max(skipped, default=0.0) - time.monotonic())

    def close(self) -> None:
        """Closes all idle connections; the client is of no use then."""
        for endpoint in list(self._endpoints.values()):
            endpoint.close()


class Endpoint:
    """The agent at `url`; any number of threads may call it.

    Attributes:
      url: as the agent prints it.
      skipped_until: when a peer that failed is asked again, by the monotonic clock.
    """

    def __init__(
        self, url: str, client: PeerClient, *, tls: ssl.SSLContext | None
    ) -> None:
        self.url, self.skipped_until = url, 0.0
        self._client, self._reason = client, ""
        self._skipped_secs = _SKIPPED_LIMITS * client.timeout_secs
        parsed = urllib.parse.urlsplit(url)
        self._path = parsed.path
        self._connect = functools.partial(
            http.client.HTTPConnection, timeout=client.timeout_secs
        )
        if parsed.scheme == "https":
            self._connect = functools.partial(
                http.client.HTTPSConnection, timeout=client.timeout_secs, context=tls
            )
        self._address = parsed.hostname or "", parsed.port
        # None for a connection that may be made.
        self._pool: queue.LifoQueue[http.client.HTTPConnection | None]
        self._pool = queue.LifoQueue()
        for _ in range(_MOST_CONNECTIONS):
            self._pool.put(None)

    def read(self, path: str, *, most_bytes: int) -> bytes:
        """The whole answer to `path`.

        Raises:
          ReadError: if it cannot be had, or has more than `most_bytes`.
        """

        def read() -> bytes:
            with self._request("GET", path) as response:
                if response.length is None or response.length > most_bytes:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {response.length} bytes, and"
                        f" at most {most_bytes} are taken"
                    )
                content = bytearray(response.length)
                for _ in self._pieces(response, memoryview(content)):
                    pass
                return bytes(content)

        return self._tried(read)

    def read_into(
        self,
        path: str,
        offset: int,
        into: memoryview,
        on_piece: source.OnPiece = source.ignored,
    ) -> None:
        """Fills `into` with bytes of `path` from `offset` on; see `source.Source`."""
        done = 0

        def fill() -> None:
            nonlocal done
            wanted = f"bytes={offset + done}-{offset + len(into) - 1}"
            with self._request("GET", path, 206, wanted=wanted) as response:
                if response.length != len(into) - done:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {response.length} bytes for"
                        f" {wanted}"
                    )
                for piece in self._pieces(response, into[done:]):
                    done += len(piece)
                    on_piece(piece)

        if len(into):
            self._tried(fill, lambda: done)
        else:
            self.size(path)

    def size(self, path: str) -> int:
        """The length of the file at `path` in bytes.

        Raises:
          ReadError: if it cannot be had.
        """

        def look() -> int:
            with self._request("HEAD", path) as response:
                length = response.getheader("Content-Length", "")
            if not re.fullmatch("[0-9]{1,18}", length):
                raise source.ReadError(f"cannot be read: {self.url} gives no size")
            return int(length)

        return self._tried(look)

    def put(self, path: str, content: bytes) -> None:
        """Sends what the agent is to take at `path`; tried once.

        Raises:
          RepairError: if it does not take it.
        """
        try:
            with self._request("PUT", path, http.HTTPStatus.NO_CONTENT, body=content):
                return
        except (source.ReadError, OSError, http.client.HTTPException) as error:
            raise source.RepairError(
                f"was not repaired: {self.url} does not take it ({_why(error)})"
            ) from None

    def close(self) -> None:
        """Closes the idle connections."""
        while not self._pool.empty():
            if (connection := self._pool.get()) is not None:
                connection.close()

    def _tried(self, attempt: Callable[[], T], progress: Callable[[], int] = int) -> T:
        waits = iter(RETRY_SECS)
        while True:
            before = progress()
            try:
                outcome = attempt()
            except (OSError, http.client.HTTPException) as error:
                if progress() > before:
                    waits = iter(RETRY_SECS)
                wait = next(waits, None) if isinstance(error, _BROKEN) else None
                if wait is None:
                    self._reason = _why(error)
                    self.skipped_until = time.monotonic() + self._skipped_secs
                    raise source.ReadError(
                        f"cannot be read: {self.url} fails ({self._reason})"
                    ) from None
                time.sleep(wait)
            else:
                self.skipped_until = 0.0
                return outcome

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        good: int = http.HTTPStatus.OK,
        *,
        body: bytes | None = None,
        wanted: str = "",
    ) -> Iterator[http.client.HTTPResponse]:
        """The response of status `good`; its connection is kept if it was read."""
        headers = {"Authorization": f"Bearer {self._client.secret()}"}
        if wanted:
            headers["Range"] = wanted
        kept, connection = None, self._pool.get()
        try:
            self._check_asked()
            connection = connection or self._connect(*self._address)
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            if response.status != good:
                raise self._refused(method, response)
            yield response
            if response.length == 0:
                response.close()
                kept = connection
        finally:
            if connection is not None and kept is None:
                connection.close()
            self._pool.put(kept)

    def _check_asked(self) -> None:
        if self._client.needs_tls and not self.url.startswith("https://"):
            raise source.ReadError(
                f"was not asked for: {self.url} does not encrypt, and this run does"
            )
        if time.monotonic() < self.skipped_until:
            raise source.ReadError(
                f"was not asked for: {self.url} has failed ({self._reason}), and is"
                f" left alone for {self._skipped_secs:g} s"
            )

    def _refused(self, method: str, response: http.client.HTTPResponse) -> Exception:
        status = response.status
        if status == http.HTTPStatus.UNAUTHORIZED:
            return source.RefusedError(
                f"cannot be read: {self.url} does not take the run's secret"
            )
        if (method, status) == ("PUT", http.HTTPStatus.CONFLICT):
            reason = response.read(_MOST_REASON_BYTES)
            return source.RepairError(reason.decode(errors="replace"))
        why = _STATUS.get(status, f"answers with status {status}")
        return source.ReadError(f"cannot be read: {self.url} {why}")

    def _pieces(
        self, response: http.client.HTTPResponse, into: memoryview
    ) -> Iterator[memoryview]:
        # A piece is the most that is lost when a connection breaks.
        bound = self._client.bound
        piece_bytes = source.PIECE_BYTES if bound is None else bound.piece_bytes
        while len(into):
            num_bytes = response.readinto(into[:piece_bytes])
            if not num_bytes:
                raise ConnectionError("closed the connection")
            yield into[:num_bytes]
            into = into[num_bytes:]
            if bound is not None:
                time.sleep(bound.take(num_bytes))


class Network:
    """Agents in processes of their own, over HTTP; simulations have another."""

    def serve(self, service: agent.Service) -> agent.AgentProcess:
        """Has the RAM disk of this machine served."""
        return agent.AgentProcess(service)

    def client(self, peers: Peers, secret: str) -> PeerClient:
        """A client of the agents of other machines, as `peers` says."""
        return PeerClient(
            secret,
            tls_ca=None if peers.tls is None else peers.tls.authority,
            timeout_secs=peers.timeout_secs,
            max_bytes_per_sec=peers.max_bytes_per_sec,
        )


def _tls(authority: epath.PathLike | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise errors.ConfigError(
            f"the certificates of peers cannot be verified with {authority}"
            f" ({error}); give a PEM file with that of their authority"
        ) from None


def _why(error: Exception) -> str:
    # What a peer sends may be the secret, and is not in messages.
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return f"does not speak HTTP: {type(error).__name__}"
    return str(error)
