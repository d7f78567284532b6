"""Agents that programs start, and letters of hosts."""

import contextlib
import os
import signal

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import (
    agent,
    mailbox,
    secret,
)
from elastic_ckpt.tiers.ram import ram_disk
from tests.tiers import served

PART = "/hosts/0/30-0/data/part"


@pytest.fixture
def service(tmp_path):
    served.save(tmp_path, 30, {"data/part": b"content"})
    return agent.Service(root=str(tmp_path))


def ask(root, url):
    return served.ask(url, PART, secret.read_or_create(root))


def test_signals_to_all_processes_of_a_job_do_not_end_it(service, tmp_path):
    """Slurm's way: the agent is needed until the last save is done."""
    with contextlib.closing(agent.AgentProcess(service)) as started:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(started.address.pid, number)
        assert ask(service.root, started.address.url) == (200, b"content")
    with pytest.raises(ProcessLookupError):
        os.kill(started.address.pid, 0)
    missing = agent.Service(root=str(tmp_path / "missing"))
    with pytest.raises(errors.RunError, match="could not be started"):
        agent.AgentProcess(missing)


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
