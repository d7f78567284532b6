"""Repairs through an agent: a client sends a file, which replaces a bad copy.

    PUT       /v1/hosts/<slot>/<step>-<save>/<path>      the whole file

The agent takes only bytes that the manifest of the slot lists, for a slot whose process
is gone or lets others repair it (`ram.file_repair`). It answers with 204, or with 409
and the reason. One file is taken at a time, and is in memory meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web
from etils import epath

from elastic_ckpt.tiers.peers import agent_connections, agent_tree
from elastic_ckpt.tiers.source import RepairError

# A chunk has at most 64 MiB and its checksum, unless it cannot be cut.
MOST_BYTES = 2**28
_LEAST_BYTES_PER_SEC = 2**20


class Sent(NamedTuple):
    """A file that a client is about to send.

    Attributes:
      slot: of the bad copy.
      step: the directory of the step in the slot.
      file: the path in that directory.
      num_bytes: that the client sends.
    """

    slot: str
    step: str
    file: str
    num_bytes: int


def sent(request: web.BaseRequest, names: Sequence[bytes]) -> Sent:
    """The file that a request announces.

    Args:
      request: with the file as its body.
      names: of the slot, the step, and the path of the file in it.

    Raises:
      NotServedError: if it is none, or too large.
    """
    num_bytes = request.content_length
    slot, *path = [os.fsdecode(name) for name in names]
    if len(path) < 2 or not slot.isdecimal():
        raise agent_tree.NotServedError
    if num_bytes is None or num_bytes > MOST_BYTES:
        raise agent_tree.NotServedError
    return Sent(slot=slot, step=path[0], file="/".join(path[1:]), num_bytes=num_bytes)


class Repairs:
    """Takes files that replace bad copies in a RAM disk.

    Args:
      root: of the RAM disk.
    """

    def __init__(self, root: epath.PathLike) -> None:
        self._root = root
        self._taking = asyncio.Lock()

    async def take(self, request: web.BaseRequest, file: Sent) -> web.Response:
        """The response to a file, once it has replaced the bad one or was refused.

        Args:
          request: with the file as its body.
          file: where it belongs.

        Raises:
          ConnectionError: if the client goes away before the end of the file.
          TimeoutError: if it sends too slowly.
        """
        # Only a repair needs what checks manifests and digests.
        from elastic_ckpt.tiers.ram import file_repair

        secs = agent_connections.PATIENCE_SECS + file.num_bytes / _LEAST_BYTES_PER_SEC
        async with self._taking:
            try:
                async with asyncio.timeout(secs):
                    content = await request.content.readexactly(file.num_bytes)
            except asyncio.IncompleteReadError:
                raise ConnectionResetError from None
            directory = os.path.join(self._root, "hosts", file.slot, file.step)
            try:
                await asyncio.to_thread(
                    file_repair.replace, directory, file.file, content
                )
            except RepairError as error:
                return _answer(409, str(error))
        return _answer(204, None)


def _answer(status: int, text: str | None) -> web.Response:
    response = web.Response(status=status, text=text)
    # The client makes a connection for each repair: they are few.
    response.force_close()
    return response
