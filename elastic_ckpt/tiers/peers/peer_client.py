"""An HTTP client for other machines' agents, with pooled connections.

Peers are not trusted: response sizes are bounded, callers compare every value with its
digest, and no message quotes a peer. A broken transfer is resumed where it stopped, a
limited number of times. If a peer is silent for the time limit or cannot be reached,
calls to that peer fail immediately until three times the limit has passed. The client
ignores redirects and the environment's proxies.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import math
import queue
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.tiers import source

# The waits before retries of a transfer without progress. The first retry is immediate:
# a pooled connection may have been closed long ago.
RETRY_SECS = (0.0, 0.1, 0.2, 0.4)
# How long a failed peer is skipped, as a multiple of the time limit.
_SKIPPED_LIMITS = 3
_MOST_CONNECTIONS = 4
_MOST_REASON_BYTES = 1000
_BROKEN = (ConnectionError, ssl.SSLEOFError, http.client.IncompleteRead)
_FAILURES = (OSError, http.client.HTTPException)
_STATUS: dict[int, str] = {
    http.HTTPStatus.UNAUTHORIZED: "does not accept the run's secret",
    http.HTTPStatus.NOT_FOUND: "has no such file",
    http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "has a shorter file",
}
_SIZE = re.compile("bytes .*/([0-9]{1,18})")
# How long unused bandwidth accumulates, so that transfers below the limit are not
# slowed; and the maximum that a transfer takes in one piece, so that others get a turn.
_BURST_SECS, _TURN_SECS = 1 / 8, 1 / 32
T = TypeVar("T")


class Bandwidth:
    """A token bucket for all transfers of a process; any thread may use it.

    Args:
      bytes_per_sec: the limit, which must be positive and may be infinite.
      clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, bytes_per_sec: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.piece_bytes = max(
            1, int(min(source.PIECE_BYTES, bytes_per_sec * _TURN_SECS))
        )
        self._bytes_per_sec, self._clock = bytes_per_sec, clock
        self._lock = threading.Lock()
        # When the limit permits the next byte.
        self._paid = clock()

    def take(self, num_bytes: int) -> float:
        """Takes `num_bytes`; returns the seconds to wait before taking more."""
        with self._lock:
            now, secs = self._clock(), num_bytes / self._bytes_per_sec
            self._paid = max(self._paid, now - _BURST_SECS) + secs
            return max(0.0, self._paid - now)

    def wait(self, num_bytes: int) -> None:
        """Takes `num_bytes` and waits until the next byte may be taken."""
        secs = self.take(num_bytes)
        # A sleep of 0 s takes longer than receiving the next bytes.
        if secs:
            time.sleep(secs)


class PeerClient:
    """Reads from other machines' agents; each process has one, for any thread.

    Args:
      secret: the run's secret, or a function that returns the current one.
      tls_ca: a PEM file with the certificate of the authority that signs the agents'
        certificates; if it is set, agents without TLS are rejected. None uses the
        system's authorities.
      timeout_secs: the seconds of silence after which a peer is skipped for three times
        as long.
      max_bytes_per_sec: the limit for all peers together; None sets no limit.

    Raises:
      ConfigError: if the authority's certificate cannot be used.
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
        self.bound = Bandwidth(max_bytes_per_sec or math.inf)
        self._tls_ca = tls_ca
        self._endpoints: dict[str, Endpoint] = {}
        if self.needs_tls:
            _ = self.tls

    @property
    def needs_tls(self) -> bool:
        """Whether agents without TLS are rejected."""
        return self._tls_ca is not None

    @functools.cached_property
    def tls(self) -> ssl.SSLContext:
        """The context that verifies agents; cached, because loading it is slow."""
        try:
            return ssl.create_default_context(cafile=self._tls_ca)
        except OSError as error:
            raise errors.ConfigError(
                f"peers' certificates cannot be verified with {self._tls_ca}"
                f" ({error}); pass a PEM file with the certificate of the authority"
                " that signed them"
            ) from None

    def endpoint(self, url: str) -> Endpoint:
        """The agent at `url`, always the same object."""
        return self._endpoints.get(url) or self._endpoints.setdefault(
            url, Endpoint(url, self)
        )

    def left_skipped_secs(self) -> float:
        """How long until all failed peers are asked again."""
        now = time.monotonic()
        known = list(self._endpoints.values())
        return max([0.0, *(each.skipped_until - now for each in known)])

    def close(self) -> None:
        """Closes all idle connections; the client must not be used afterwards."""
        for endpoint in list(self._endpoints.values()):
            while not endpoint.pool.empty():
                endpoint.pool.get().close()


class Endpoint:
    """The agent at `url`; any number of threads may call it.

    Attributes:
      skipped_until: when to ask a failed peer again, on the monotonic clock.
      pool: pooled connections, which open when they are used.
      manifests: the manifests read from the agent, keyed by list entry (see `peer`).
    """

    def __init__(self, url: str, client: PeerClient) -> None:
        self.url, self._client = url, client
        self.skipped_until, self._reason = 0.0, ""
        self.manifests: dict[Any, Manifest] = {}
        self.pool: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()
        at = urllib.parse.urlsplit(url)
        self._path, place = at.path, (at.hostname or "", at.port)
        secs = client.timeout_secs
        for _ in range(_MOST_CONNECTIONS):
            self.pool.put(
                http.client.HTTPSConnection(*place, timeout=secs, context=client.tls)
                if at.scheme == "https"
                else http.client.HTTPConnection(*place, timeout=secs)
            )

    def read(self, path: str, *, most_bytes: int) -> bytes:
        """The whole response for `path`.

        Raises:
          ReadError: if the request fails, or the response exceeds `most_bytes`.
        """

        def read() -> bytes:
            with self._request("GET", path, http.HTTPStatus.OK) as response:
                if response.length is None or response.length > most_bytes:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {response.length} bytes, but"
                        f" at most {most_bytes} are accepted"
                    )
                content = response.read()
            self._client.bound.wait(len(content))
            return content

        return self._tried(read)

    def read_into(
        self, path: str, into: memoryview, on_piece: source.OnPiece = source.ignored
    ) -> int:
        """Fills `into` with the first bytes of `path`; see `source.Source`."""
        done, bound = 0, self._client.bound

        def fill() -> int:
            nonlocal done
            wanted = f"bytes={done}-{len(into) - 1}"
            good = http.HTTPStatus.PARTIAL_CONTENT
            with self._request("GET", path, good, Range=wanted) as response:
                size = _SIZE.fullmatch(response.getheader("Content-Range", ""))
                if size is None or response.length != len(into) - done:
                    raise source.ReadError(
                        f"cannot be read: {self.url} sends {response.length} bytes for"
                        f" {wanted}"
                    )
                while done < len(into):
                    piece = into[done : done + bound.piece_bytes]
                    num_bytes = response.readinto(piece)
                    if not num_bytes:
                        raise ConnectionError("closed the connection")
                    on_piece(piece[:num_bytes])
                    done += num_bytes
                    bound.wait(num_bytes)
            return int(size[1])

        if not len(into):
            # A range cannot be empty.
            return len(self.read(path, most_bytes=0))
        return self._tried(fill, lambda: done)

    def put(self, path: str, content: bytes) -> None:
        """Sends `content` to the agent, without retries.

        As with `read`, a silent agent is skipped for a while.

        Raises:
          RepairError: if the agent does not accept the content.
        """
        good = http.HTTPStatus.NO_CONTENT, http.HTTPStatus.CONFLICT
        try:
            with self._request("PUT", path, *good, body=content) as response:
                if response.status == http.HTTPStatus.CONFLICT:
                    reason = response.read(_MOST_REASON_BYTES)
                    raise source.RepairError(reason.decode(errors="replace"))
        except (source.ReadError, *_FAILURES) as error:
            # On any other error, a pooled connection may just have been closed.
            if isinstance(error, TimeoutError):
                self._skip(error)
            raise source.RepairError(
                f"was not repaired: {self.url} did not accept the repair"
                f" ({_why(error)})"
            ) from None

    def _tried(self, attempt: Callable[[], T], progress: Callable[[], int] = int) -> T:
        waits = iter(RETRY_SECS)
        while True:
            before = progress()
            try:
                outcome = attempt()
                self.skipped_until = 0.0
                return outcome
            except _FAILURES as error:
                errors.check_open_files(error)
                if progress() > before:
                    waits = iter(RETRY_SECS)
                wait = next(waits, None) if isinstance(error, _BROKEN) else None
                if wait is None:
                    self._skip(error)
                    raise source.ReadError(
                        f"cannot be read: {self.url} fails ({self._reason})"
                    ) from None
                time.sleep(wait)

    def _skip(self, error: Exception) -> None:
        self._reason, limit = _why(error), self._client.timeout_secs
        self.skipped_until = time.monotonic() + _SKIPPED_LIMITS * limit

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        *good: int,
        body: bytes | None = None,
        **headers: str,
    ) -> Iterator[http.client.HTTPResponse]:
        # Yields a response with a `good` status, which the block must read to its end.
        headers["Authorization"] = f"Bearer {self._client.secret()}"
        connection = self.pool.get()
        try:
            if self._client.needs_tls and not self.url.startswith("https://"):
                raise source.ReadError(
                    f"was not requested: {self.url} does not encrypt, but this run does"
                )
            if time.monotonic() < self.skipped_until:
                raise source.ReadError(
                    f"was not requested: {self.url} has failed ({self._reason}) and is"
                    f" skipped for {_SKIPPED_LIMITS} times the time limit"
                )
            connection.request(method, self._path + path, body, headers)
            with connection.getresponse() as response:
                if response.status not in good:
                    is_refused = response.status == http.HTTPStatus.UNAUTHORIZED
                    kind = source.RefusedError if is_refused else source.ReadError
                    other = f"answers with status {response.status}"
                    why = _STATUS.get(response.status, other)
                    raise kind(f"cannot be read: {self.url} {why}")
                yield response
        except BaseException:
            connection.close()
            raise
        finally:
            self.pool.put(connection)


def _why(error: Exception) -> str:
    # A peer's words may contain the secret, so messages do not quote them.
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return f"does not speak HTTP: {type(error).__name__}"
    return str(error)
