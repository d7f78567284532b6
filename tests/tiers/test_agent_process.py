"""Agents that programs start."""

import contextlib
import os
import signal

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent, secret
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
