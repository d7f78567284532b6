"""Answers the requests to an agent: bytes of files, the list of manifests, repairs.

    GET       /v1/steps                                  manifests, as JSON
    GET       /v1/machine                                the machine, as JSON
    GET, HEAD /v1/hosts/<slot>/<step>-<save>/<path>      a file, or a range of its bytes
    PUT       /v1/hosts/<slot>/<step>-<save>/<path>      see `agent_repairs`
    PUT       /v1/backup                                 see `backup_requests`

Everything needs the run's secret (`Authorization: Bearer ...`), and all else is 404.
Clients whose version of the protocol is too far away get 426 (`protocol`).
"""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable

from aiohttp import http, web
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.peers import (
    agent_connections,
    agent_repairs,
    agent_tree,
    backup_directory,
    backup_requests,
    bandwidth,
    protocol,
    secret,
)

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
      known: the secret.
      bandwidth_bound: shared by all answers; None without a bound.

    Attributes:
      on_secret: called with the protocol of a connection that has shown the secret.
    """

    def __init__(
        self,
        root: epath.PathLike,
        *,
        machine: str,
        known: secret.Watched,
        bandwidth_bound: bandwidth.Bandwidth | None,
    ) -> None:
        self._root = root
        self._machine = machine
        self._known = known
        self._bandwidth = bandwidth_bound
        self._repairs = agent_repairs.Repairs(root)
        self.on_secret: Callable[[asyncio.BaseProtocol], None] = lambda _: None

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The response, sent when this returns."""
        response = self._response(request)
        try:
            if isinstance(response, agent_repairs.Sent):
                response = await self._repairs.take(request, response)
            if isinstance(response, backup_requests.Sent):
                response = await backup_requests.take(request, response, self._root)
            if isinstance(response, io.FileIO):
                with response as file:
                    return await self._send_file(request, file)
            async with asyncio.timeout(agent_connections.PATIENCE_SECS):
                await response.prepare(request)
                await response.write_eof()
            return response
        except (ConnectionError, TimeoutError):
            # The client is gone or does not read, or the file has become shorter: that
            # bytes are missing shows by the end of the connection.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    def _response(
        self, request: web.BaseRequest
    ) -> web.Response | io.FileIO | agent_repairs.Sent | backup_requests.Sent:
        if not self._is_authorized(request.headers.get("Authorization", "")):
            return _refusal(401, {"WWW-Authenticate": "Bearer"})
        self.on_secret(request.protocol)
        if protocol.problem(request.headers.get(protocol.HEADER)):
            return _refusal(protocol.STATUS)
        path = request.raw_path
        is_sent = request.method == "PUT" and (
            path.startswith(_FILES) or path == backup_directory.URL_PATH
        )
        if not is_sent and (
            request.method not in ("GET", "HEAD") or request.body_exists
        ):
            return _refusal(404)
        if path == "/v1/steps":
            return _json(agent_tree.manifests(self._root))
        if path == "/v1/machine":
            return _json(
                {
                    "machine": self._machine,
                    "time": time.time(),
                    "version": protocol.VERSION,
                }
            )
        try:
            if is_sent and path == backup_directory.URL_PATH:
                return backup_requests.sent(request, self._root)
            if not path.startswith(_FILES):
                raise agent_tree.NotServedError
            names = agent_tree.parts(path.removeprefix(_FILES))
            if is_sent:
                return agent_repairs.sent(request, names)
            return agent_tree.open_file(self._root, names)
        except agent_tree.NotServedError:
            return _refusal(404)

    def _is_authorized(self, authorization: str) -> bool:
        known = self._known.current()
        if known is None:
            return False
        given = authorization.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {known}".encode())

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
            response: web.StreamResponse = _refusal(
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


async def serve(
    answers: Answers,
    *,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    most_connections: int,
    most_connections_of_client: int,
    ended: asyncio.Event,
) -> None:
    """Answers the clients that connect to `listening`, until `ended` is set."""
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
    try:
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(connections.accept(listening))
            await ended.wait()
            accepting.cancel()
    finally:
        await server.shutdown(timeout=_ENDING_SECS)


def _json(value: storage.Json) -> web.Response:
    return web.Response(
        body=storage.canonical_json(value),
        content_type="application/json",
        headers=_VERSION,
    )


def _refusal(status: int, headers: dict[str, str] | None = None) -> web.Response:
    response = web.Response(status=status, headers=_VERSION | (headers or {}))
    # A client that guesses secrets has to reconnect for each attempt.
    response.force_close()
    return response
