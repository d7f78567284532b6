"""Requests to a backup host: which parts of a step it is to fetch, in one file.

    PUT       /v1/backup         a message (`steps.part_message`)

The agent of a backup host takes them, and of no other directory: its owner has created
`<root>/backup_host`. The newest request replaces one that was not taken yet, so that a
backup host that is behind skips steps. It answers with 204.
"""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

from aiohttp import web
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.peers import agent_connections, agent_tree, backup_directory

# The rows of a million parts.
MOST_BYTES = 2**27
_LEAST_BYTES_PER_SEC = 2**20


class Sent(NamedTuple):
    """A request that a client is about to send, of `num_bytes`."""

    num_bytes: int


def sent(request: web.BaseRequest, root: epath.PathLike) -> Sent:
    """The announced request.

    Raises:
      NotServedError: if the RAM disk at `root` is none of a backup host, or the request
        is too large.
    """
    num_bytes = request.content_length
    if num_bytes is None or num_bytes > MOST_BYTES:
        raise agent_tree.NotServedError
    if not backup_directory.is_one(root):
        raise agent_tree.NotServedError
    return Sent(num_bytes)


async def take(
    request: web.BaseRequest, announced: Sent, root: epath.PathLike
) -> web.Response:
    """Stores a request for the backup host, and returns the response.

    Raises:
      ConnectionError: if the client goes away before the end.
      TimeoutError: if it sends too slowly.
    """
    secs = agent_connections.PATIENCE_SECS + announced.num_bytes / _LEAST_BYTES_PER_SEC
    try:
        async with asyncio.timeout(secs):
            content = await request.content.readexactly(announced.num_bytes)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError from None
    path = os.path.join(root, backup_directory.REQUEST)
    await asyncio.to_thread(storage.write_atomic, path, content)
    response = web.Response(status=204)
    response.force_close()
    return response
