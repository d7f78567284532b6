"""Programs that bring parts of steps to RAM disks that lack them.

One is started for a directory when a host has noted another world there (the node may
have been replaced), or has sent a backup host another request, and again after a while
if it fails. It is a separate process, so that the agent serves meanwhile, and stays
small. What it has to bring, it reads in the directory (`host.refill`).
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Sequence

from elastic_ckpt.tiers.peers import backup_directory, world_record

_RETRY_SECS = 30.0


class Refills:
    """The programs that run, at most one a directory, until a `with` block ends.

    Args:
      command: of the program, without its last argument, a directory; empty for none.
      announce: called with each line that a program prints.
    """

    def __init__(
        self, command: Sequence[str], announce: Callable[[str], object]
    ) -> None:
        self._command = command
        self._announce = announce
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # By directory: the version of its needs that a program has seen to, and when it
        # is started again for the same.
        self._handled: dict[str, tuple[int, float]] = {}

    def update(self, root: str, name: str = "") -> None:
        """Starts the program for a directory whose needs are new.

        Args:
          root: the directory.
          name: for what it prints, if there are several directories.
        """
        task = self._tasks.get(root)
        if not self._command or (task is not None and not task.done()):
            return
        if task is not None:
            self._tasks.pop(root).result()
        version = _version(root)
        handled, again_at = self._handled.get(root, (None, 0.0))
        if version is None or (version == handled and time.monotonic() < again_at):
            return
        self._tasks[root] = asyncio.ensure_future(self._fill(root, name, version))

    async def __aenter__(self) -> Refills:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all programs; what they have not finished is a leftover."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _fill(self, root: str, name: str, version: int) -> None:
        # Ctrl-C in a terminal is for the agent alone, which then kills it.
        process = await asyncio.create_subprocess_exec(
            *(*self._command, root),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        again_secs = _RETRY_SECS if process.returncode else math.inf
        self._handled[root] = (version, time.monotonic() + again_secs)
        prefix = f"{name}: " if name else ""
        if process.returncode:
            print(f"{name or root} was not filled", file=sys.stderr, flush=True)
        for line in stdout.decode().splitlines():
            self._announce(prefix + line)


def _version(root: str) -> int | None:
    # Another number when a directory has other needs; None while it has none.
    newest = None
    for file in (world_record.FILE, backup_directory.REQUEST):
        try:
            changed = os.stat(os.path.join(root, file)).st_mtime_ns
        except FileNotFoundError:
            continue
        newest = max(newest or 0, changed)
    return newest
