"""The agent that a process starts serves as long as that process needs it."""

import contextlib
import dataclasses
import os
import signal

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent, agent_process, secret
from tests.tiers import served

FILES = {"data/part": b"content"}
PART = "/v1/hosts/0/30-0/data/part"


@pytest.fixture
def service(tmp_path):
    served.save(tmp_path, 30, FILES)
    return agent.Service(root=str(tmp_path))


def ask(root, url):
    return served.ask(url, PART, secret.read_or_create(root))


def test_signals_to_all_processes_of_a_job_do_not_end_it(service):
    """Slurm's way: the agent is needed until the last save is done."""
    with contextlib.closing(agent_process.AgentProcess(service)) as started:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(started.address.pid, number)
        assert ask(service.root, started.address.url) == (200, b"content")
    with pytest.raises(ProcessLookupError):
        os.kill(started.address.pid, 0)


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
            assert agent.find(service.root) == started.address
        finally:
            os.kill(started.address.pid, signal.SIGCONT)


def test_one_that_cannot_start_beside_another_is_an_error(service, tmp_path):
    service = agent.Service(root=str(tmp_path / "missing"), is_beside=True)
    with pytest.raises(errors.RunError, match="could not be started"):
        agent_process.AgentProcess(service)
