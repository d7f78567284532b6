"""Another program brings parts of steps to a RAM disk that lacks them.

It is started when a host has noted another world in the directory (the node may have
been replaced), and again after a while if it fails, or when a host has sent a backup
host another request. It is a separate process, so that the agent serves meanwhile, and
stays small. What it has to bring, it reads in the directory (`host.refill`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from elastic_ckpt.tiers.peers import backup_directory, world_record

_POLL_SECS = 0.2


@contextlib.asynccontextmanager
async def kept_filled(
    root: str,
    command: Sequence[str],
    *,
    announce: Callable[[str], object],
    retry_secs: float = 30.0,
) -> AsyncIterator[None]:
    """Has a directory filled while the block lasts.

    Args:
      root: the directory.
      command: of the program, without its last argument, `root`; empty for none.
      announce: called with each line that it prints.
      retry_secs: until it is started again if it fails.
    """
    if not command:
        yield
        return
    filling = asyncio.create_task(
        _keep_filled([*command, root], root, announce, retry_secs)
    )
    try:
        yield
    finally:
        # What it has not finished is a leftover.
        filling.cancel()
        await asyncio.wait([filling])


async def _keep_filled(
    command: Sequence[str],
    root: str,
    announce: Callable[[str], object],
    retry_secs: float,
) -> None:
    loop = asyncio.get_running_loop()
    handled, failed, again_at = set[int](), set[int](), 0.0
    while True:
        needs = _needs(root)
        if needs - handled and (needs != failed or loop.time() > again_at):
            try:
                for line in await _output(command):
                    announce(line)
                handled = needs
            except OSError as error:
                print(f"{root} is not filled: {error}", file=sys.stderr, flush=True)
                failed, again_at = needs, loop.time() + retry_secs
        await asyncio.sleep(_POLL_SECS)


async def _output(command: Sequence[str]) -> list[str]:
    # Ctrl-C in a terminal is for the agent alone.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, _ = await asyncio.to_thread(process.communicate)
    finally:
        # If it has not ended, the agent ends; the thread waits for the process.
        process.kill()
    if process.returncode:
        raise OSError(f"its program ended with status {process.returncode}")
    return stdout.splitlines()


def _needs(root: str) -> set[int]:
    # A number for each thing that a directory may need, another one when it is new.
    changes = set()
    for file in (world_record.FILE, backup_directory.REQUEST):
        with contextlib.suppress(FileNotFoundError):
            changes.add(os.stat(os.path.join(root, file)).st_mtime_ns)
    return changes
