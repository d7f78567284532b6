"""The program that fills a directory is started once for each of its needs."""

import asyncio
import contextlib
import pathlib
import sys

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.peers import backup_directory, refills, world_record

LIMIT_SECS = 600
# It takes a request, as that of a backup host does.
TAKING = (
    "import os, sys\n"
    f"request = os.path.join(sys.argv[1], {backup_directory.REQUEST!r})\n"
    "is_requested = os.path.exists(request)\n"
    "if is_requested:\n"
    "    os.remove(request)\n"
    "print('requested' if is_requested else 'placed')\n"
)
# It fails the first time.
FAILING = (
    "import os, sys\n"
    "try:\n"
    "    os.mkdir(os.path.join(sys.argv[1], 'failed'))\n"
    "except FileExistsError:\n"
    "    print('tried again')\n"
    "else:\n"
    "    sys.exit(1)\n"
)


@contextlib.asynccontextmanager
async def filled(root, program):
    """Yields what waits for the next line that a program prints."""
    lines = asyncio.Queue()

    async def next_line():
        return await asyncio.wait_for(lines.get(), LIMIT_SECS)

    command = (sys.executable, "-c", program)
    async with refills.kept_filled(
        str(root), command, announce=lines.put_nowait, retry_secs=0
    ):
        yield next_line
    assert lines.empty()


def test_a_world_that_is_noted_and_each_request_start_it_once(tmp_path):
    async def run():
        async with filled(tmp_path, TAKING) as next_line:
            for _ in range(2):
                storage.write_atomic(tmp_path / backup_directory.REQUEST, b"")
                assert await next_line() == "requested"
            storage.write_atomic(tmp_path / world_record.FILE, b"")
            assert await next_line() == "placed"
            storage.write_atomic(tmp_path / backup_directory.REQUEST, b"")
            assert await next_line() == "requested"

    asyncio.run(run())


def test_one_that_fails_is_started_again(tmp_path, capsys):
    storage.write_atomic(tmp_path / world_record.FILE, b"")

    async def run():
        async with filled(tmp_path, FAILING) as next_line:
            assert await next_line() == "tried again"

    asyncio.run(run())
    assert f"{tmp_path} is not filled" in capsys.readouterr().err


def test_one_that_runs_at_the_end_is_ended(tmp_path):
    storage.write_atomic(tmp_path / world_record.FILE, b"")
    program = (
        "import os, sys, time\n"
        "os.mkdir(os.path.join(sys.argv[1], str(os.getpid())))\n"
        "time.sleep(3600)\n"
    )

    async def run():
        async with filled(tmp_path, program):
            while not (pids := [int(p.name) for p in tmp_path.iterdir() if p.is_dir()]):
                await asyncio.sleep(0)
        return pids

    (pid,) = asyncio.run(run())
    assert not pathlib.Path(f"/proc/{pid}").exists()
