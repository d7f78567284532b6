"""Agents that programs start, what they are asked by others, and letters of hosts."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest, owners
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    backup_directory,
    mailbox,
    peer_client,
    refills,
    secret,
    world_record,
)
from elastic_ckpt.tiers.ram import ram_disk
from tests.tiers import served

PART = "/v1/hosts/0/30-0/data/part"


@pytest.fixture
def service(tmp_path):
    served.save(tmp_path, 30, {"data/part": b"content"})
    return agent.Service(root=str(tmp_path))


def ask(root, url):
    return served.ask(url, PART, secret.read_or_create(root))


def test_signals_to_all_processes_of_a_job_do_not_end_it(service, tmp_path):
    """Slurm's way: the agent is needed until the last save is done."""
    with contextlib.closing(agent_process.AgentProcess(service)) as started:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(started.address.pid, number)
        assert ask(service.root, started.address.url) == (200, b"content")
    with pytest.raises(ProcessLookupError):
        os.kill(started.address.pid, 0)
    missing = agent.Service(root=str(tmp_path / "missing"), is_beside=True)
    with pytest.raises(errors.RunError, match="could not be started"):
        agent_process.AgentProcess(missing)


@pytest.mark.slow
def test_another_one_serves_beside_an_agent_that_does_not_answer(service):
    with contextlib.closing(agent_process.AgentProcess(service)) as started:
        os.kill(started.address.pid, signal.SIGSTOP)
        try:
            beside = dataclasses.replace(service, is_beside=True)
            with contextlib.closing(agent_process.AgentProcess(beside)) as other:
                url = other.address.url
                assert ask(service.root, url) == (200, b"content")
                # Nobody else finds it.
                assert agent.find(service.root) == started.address
            with pytest.raises(OSError, match="refused"):
                ask(service.root, url)
        finally:
            os.kill(started.address.pid, signal.SIGCONT)


def test_the_agent_of_a_backup_host_keeps_the_newest_request_of_who_has_the_secret(
    tmp_path,
):
    root = tmp_path / "ram"
    backup_directory.make(root)
    with served.serving(agent.Service(root=str(root))) as address:
        own = secret.read_or_create(root)
        for known, last in ((own, b"1"), ("another-secret-of-the-run", b"2")):
            with contextlib.closing(peer_client.PeerClient(known)) as client:
                endpoint = client.endpoint(address.url)
                for content in (b"first", b"second"):
                    with contextlib.suppress(source.RepairError):
                        endpoint.put(backup_directory.URL_PATH, content + last)
    assert backup_directory.take_request(root) == b"second1"
    assert backup_directory.take_request(root) is None


# A program that fails the first time.
FAILING = (
    "import os, sys\n"
    "try:\n"
    "    os.mkdir(os.path.join(sys.argv[1], 'failed'))\n"
    "except FileExistsError:\n"
    "    print('filled')\n"
    "else:\n"
    "    sys.exit(1)\n"
)


def test_a_directory_is_filled_once_a_world_is_noted_and_again_if_that_fails(
    tmp_path, capsys
):
    record = world_record.WorldRecord(
        run="run",
        hosts=(manifest.Host(id="a.0", number=0, domains={"rack": "r"}),),
        policy=owners.Policy(copies=1, domain="rack"),
        limit_bytes=9,
    )
    assert world_record.read(tmp_path) is None
    world_record.write(tmp_path, record)
    assert world_record.read(tmp_path) == record

    async def filled():
        lines = asyncio.Queue()
        command = (sys.executable, "-c", FAILING)
        async with refills.kept_filled(
            str(tmp_path), command, announce=lines.put_nowait, retry_secs=0
        ):
            return await asyncio.wait_for(lines.get(), 600)

    assert asyncio.run(filled()) == "filled"
    assert f"{tmp_path} is not filled" in capsys.readouterr().err
    (tmp_path / world_record.FILE).write_text("{")
    assert world_record.read(tmp_path) is None


def test_exchanges_of_one_host_do_not_disturb_each_other(tmp_path):
    disk = ram_disk.RamDisk(tmp_path, run="run")
    host = manifest.Host(id=disk.host_id(0), number=0, domains={})
    posting, removing = (
        mailbox.Mailbox(disk, slot=0, hosts=[host], endpoint=None) for _ in range(2)
    )
    posting.post("copies-offered", b"1")
    removing.remove("backup-")
    assert posting.read(0, "copies-offered") == b"1"
    posting.remove("copies-")
    with pytest.raises(source.ReadError, match="is missing"):
        posting.read(0, "copies-offered")
    # The directory stays: another exchange may be about to post there.
    assert list((tmp_path / "hosts" / "0" / mailbox.MESSAGES).iterdir()) == []
    # What is delivered is read once, and removed with its exchange.
    posting.deliver(0, "copies-offered", b"another way")
    assert posting.read(0, "copies-offered") == b"another way"
    with pytest.raises(source.ReadError):
        posting.read(0, "copies-offered")
    posting.deliver(0, "copies-offered", b"late")
    posting.remove("copies-")
    with pytest.raises(source.ReadError):
        posting.read(0, "copies-offered")
