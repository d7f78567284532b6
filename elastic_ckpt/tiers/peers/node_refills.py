"""Programs that fill the directories of runs on a node that was replaced.

One is started for each world that a run has on the node, and again with each sweep if
it fails. It is a separate process, so that the agent serves meanwhile, and stays small.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence

from elastic_ckpt.tiers.peers import world_record


class Refills:
    """The programs that run for a node, at most one a run.

    Args:
      command: of the program, without its last argument, a directory; empty for none.
      announce: called with a line for each directory that was filled.
    """

    def __init__(self, command: Sequence[str], announce: Callable[[str], None]) -> None:
        self._command = command
        self._announce = announce
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # By run, the version of the world for which nothing more is to be done.
        self._handled: dict[str, int] = {}
        self._failed: dict[str, int] = {}

    def update(self, path: str, root: str) -> None:
        """Starts the program for a run whose world is new.

        Args:
          path: of the run, for messages.
          root: its directory.
        """
        task = self._tasks.get(path)
        if task is not None and task.done():
            del self._tasks[path]
            task.result()
        version = world_record.version(root) if self._command else None
        known = (self._handled.get(path), self._failed.get(path))
        if version is None or version in known or path in self._tasks:
            return
        self._tasks[path] = asyncio.ensure_future(self._fill(path, root, version))

    def retry(self) -> None:
        """Has the programs that failed start again."""
        self._failed.clear()

    async def close(self) -> None:
        """Ends all programs; what they have not finished is a leftover."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _fill(self, path: str, root: str, version: int) -> None:
        try:
            process = subprocess.Popen(
                [*self._command, root], stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._failed[path] = version
            print(f"{path} is not filled: {error}", file=sys.stderr)
            return
        try:
            stdout, _ = await asyncio.to_thread(process.communicate)
        finally:
            # If it has not ended, the agent ends; the thread waits for the process.
            process.kill()
        if process.returncode:
            self._failed[path] = version
            print(f"{path} is not filled; it is tried again", file=sys.stderr)
            return
        self._handled[path] = version
        if stdout:
            self._announce(f"{path}: {stdout.strip()}")
