"""Answers the requests to an agent: bytes of files, the list of manifests, repairs.

    GET       /v1/steps                                  manifests, as JSON
    GET       /v1/machine                                the machine, as JSON
    GET, HEAD /v1/hosts/<slot>/<step>-<save>/<path>      a file, or a range of its bytes
    PUT       /v1/hosts/<slot>/<step>-<save>/<path>      a file that replaces a bad copy
    PUT       /v1/holds/<step>-<save>                    keeps a step in RAM for a while

Everything needs the run's secret (`Authorization: Bearer ...`), and all else is 404.
Clients of another version of the protocol get 426 (`protocol`).

Of a file the agent takes only bytes that the manifest of the slot lists, for a slot
whose process is gone or lets others repair it (`ram.file_repair`). It answers with 204,
or with 409 and the reason. One file is taken at a time, and is in memory meanwhile.

The body of a hold is a number of seconds (`RamDisk.hold`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import io
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable

from aiohttp import http, web
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.peers import (
    agent_connections,
    agent_tree,
    bandwidth,
    protocol,
    secret,
)
from elastic_ckpt.tiers.source import RepairError

# A chunk has at most 64 MiB and its checksum, unless it cannot be cut.
MOST_FILE_BYTES = 2**28
_HOLDS = "/v1/holds/"
_LEAST_BYTES_PER_SEC = 2**20
_FILES = "/v1/hosts/"
# Enough that the loop is not in the way, and little enough that also a slow client gets
# it within the patience that there is.
_PIECE_BYTES = 2**20
# With TLS, pieces pass through Python's memory.
_TLS_PIECE_BYTES = 256 * 2**10
_MOST_HEADER_BYTES = 8190
_MOST_HEADERS = 64
# Clients go on elsewhere with what is cut off.
_ENDING_SECS = 0.1

_VERSION = {protocol.HEADER: str(protocol.VERSION)}

_log = logging.getLogger(__name__)


def _is_for_the_log(record: logging.LogRecord) -> bool:
    # A malformed request is answered with 400. Its content may be a secret and must not
    # be logged, and many such requests must not fill the log.
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http.HttpProcessingError)


_log.addFilter(_is_for_the_log)


class Answers:
    """The response of an agent to each request.

    Args:
      root: of the RAM disk.
      machine: its id.
      secret_file: that holds the run's secret now.
      bandwidth_bound: shared by all answers; None without a bound.

    Attributes:
      on_secret: called with the protocol of a connection that has shown the secret.
    """

    def __init__(
        self,
        root: epath.PathLike,
        *,
        machine: str,
        secret_file: str,
        bandwidth_bound: bandwidth.Bandwidth | None,
    ) -> None:
        self._root = root
        self._machine = machine
        self._secret_file = secret_file
        self._bandwidth = bandwidth_bound
        self._repairing = asyncio.Lock()
        self.on_secret: Callable[[asyncio.BaseProtocol], None] = lambda _: None

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The response, sent when this returns."""
        try:
            answer = await self._answer(request)
            if isinstance(answer, io.FileIO):
                with answer as file:
                    return await self._send_file(request, file)
            async with asyncio.timeout(agent_connections.PATIENCE_SECS):
                await answer.prepare(request)
                await answer.write_eof()
            return answer
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            # The client is gone, too slow or does not read, or the file has become
            # shorter: that bytes are missing shows by the end of the connection.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    async def _answer(self, request: web.BaseRequest) -> web.Response | io.FileIO:
        if not self._is_authorized(request.headers.get("Authorization", "")):
            return _closing(401, {"WWW-Authenticate": "Bearer"})
        self.on_secret(request.protocol)
        if protocol.problem(request.headers.get(protocol.HEADER)):
            return _closing(protocol.STATUS)
        path = request.raw_path
        try:
            if request.method == "PUT":
                return await self._put(request, path)
            if request.method in ("GET", "HEAD") and not request.body_exists:
                return self._get(path)
        except agent_tree.NotServedError:
            pass
        return _closing(404)

    def _is_authorized(self, authorization: str) -> bool:
        known = secret.current(self._secret_file)
        if known is None:
            return False
        given = authorization.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {known}".encode())

    def _get(self, path: str) -> web.Response | io.FileIO:
        if path == "/v1/steps":
            return _json(agent_tree.manifests(self._root))
        if path == "/v1/machine":
            return _json({"machine": self._machine})
        return agent_tree.open_file(self._root, _names(path))

    async def _put(self, request: web.BaseRequest, path: str) -> web.Response:
        if path.startswith(_HOLDS):
            name = path.removeprefix(_HOLDS)
            return await _taken(
                request, 99, functools.partial(preserved.hold, self._root, name)
            )
        slot, *names = [os.fsdecode(name) for name in _names(path)]
        if len(names) < 2 or not slot.isdecimal():
            raise agent_tree.NotServedError
        # Only a repair needs what checks manifests and digests.
        from elastic_ckpt.tiers.ram import file_repair

        directory = os.path.join(self._root, "hosts", slot, names[0])
        put = functools.partial(file_repair.replace, directory, "/".join(names[1:]))
        async with self._repairing:
            return await _taken(request, MOST_FILE_BYTES, put)

    async def _send_file(
        self, request: web.BaseRequest, file: io.FileIO
    ) -> web.StreamResponse:
        size = os.fstat(file.fileno()).st_size
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            **_VERSION,
        }
        ranged = "Range" in request.headers
        try:
            start, stop, _ = request.http_range.indices(size)
        except ValueError:
            start = stop = size
        if ranged and start >= stop:
            response: web.StreamResponse = _closing(
                416, {"Content-Range": f"bytes */{size}"}
            )
            await response.prepare(request)
            return response
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
        response.content_length = stop - start
        async with asyncio.timeout(agent_connections.PATIENCE_SECS):
            await response.prepare(request)
        if request.method == "GET":
            await self._send_bytes(request, response, file, start, stop)
        return response

    async def _send_bytes(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        file: io.FileIO,
        start: int,
        stop: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        encrypted = transport.get_extra_info("sslcontext") is not None
        piece_bytes = _TLS_PIECE_BYTES if encrypted else _PIECE_BYTES
        if self._bandwidth:
            piece_bytes = self._bandwidth.piece_bytes(piece_bytes)
        while start < stop:
            num_bytes = min(piece_bytes, stop - start)
            if transport.is_closing():
                raise ConnectionResetError
            async with asyncio.timeout(agent_connections.PATIENCE_SECS):
                if encrypted:
                    piece = os.pread(file.fileno(), num_bytes, start)
                    await response.write(piece)
                    sent = len(piece)
                else:
                    sent = await loop.sendfile(
                        transport, file, start, num_bytes, fallback=False
                    )
            if sent < num_bytes:
                # The file was cut short meanwhile.
                raise ConnectionResetError
            start += sent
            if self._bandwidth:
                await asyncio.sleep(self._bandwidth.take(sent))


@contextlib.asynccontextmanager
async def serving(
    answers: Answers,
    *,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    most_connections: int,
    most_connections_of_client: int,
) -> AsyncIterator[None]:
    """Answers the clients that connect to `listening` while the block lasts."""
    server = web.Server(
        answers,
        access_log=None,
        logger=_log,
        keepalive_timeout=agent_connections.PATIENCE_SECS,
        lingering_time=0,
        max_line_size=_MOST_HEADER_BYTES,
        max_field_size=_MOST_HEADER_BYTES,
        max_headers=_MOST_HEADERS,
    )
    connections = agent_connections.Connections(
        server,
        tls=tls,
        most=most_connections,
        most_of_client=most_connections_of_client,
    )
    answers.on_secret = connections.has_shown_secret
    accepting = asyncio.create_task(connections.accept(listening))
    try:
        yield
    finally:
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        await server.shutdown(timeout=_ENDING_SECS)


async def _taken(
    request: web.BaseRequest, most_bytes: int, put: Callable[[bytes], object]
) -> web.Response:
    """The response to a body, once `put` has stored it or has refused it."""
    num_bytes = request.content_length
    if num_bytes is None or num_bytes > most_bytes:
        raise agent_tree.NotServedError
    secs = agent_connections.PATIENCE_SECS + num_bytes / _LEAST_BYTES_PER_SEC
    async with asyncio.timeout(secs):
        content = await request.content.readexactly(num_bytes)
    try:
        await asyncio.to_thread(put, content)
    except RepairError as error:
        return _closing(409, text=str(error))
    return _closing(204)


def _names(path: str) -> list[bytes]:
    if not path.startswith(_FILES):
        raise agent_tree.NotServedError
    return agent_tree.parts(path.removeprefix(_FILES))


def _json(value: storage.Json) -> web.Response:
    return web.Response(
        body=storage.canonical_json(value),
        content_type="application/json",
        headers=_VERSION,
    )


def _closing(
    status: int, headers: dict[str, str] | None = None, *, text: str | None = None
) -> web.Response:
    response = web.Response(
        status=status, text=text, headers=_VERSION | (headers or {})
    )
    # A client that guesses secrets has to reconnect for each attempt.
    response.force_close()
    return response
