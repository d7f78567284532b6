"""The record of a run's agents, by which programs in no world find them."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import run_agents
from elastic_ckpt.tiers.persistent.run_agents import RunAgents

URLS = {"00ff": "http://10.0.0.7:8470", "01ff": f"https://host:1#{'ab' * 32}"}
# As it is in storage: those who follow a run may be older or newer.
BYTES = b"""{
"version": 1,
"run": "mine",
"urls": {"00ff":"http://10.0.0.7:8470"},
"digest": "e0f3aad138e957eb9d6c597476343b12"
}
"""


@pytest.fixture(params=["local", "gs"])
def steps(request, steps_in):
    """The directory of a run's steps, on a disk or in a bucket."""
    return steps_in(request.param)


def test_each_world_replaces_the_record_and_one_without_agents_has_none(steps):
    assert run_agents.read(steps) is None
    for urls in (URLS, {"00ff": "http://10.0.0.7:9"}):
        agents = RunAgents(run="mine", urls=urls)
        run_agents.write(steps, agents)
        assert run_agents.read(steps) == agents
    for _ in range(2):
        run_agents.write(steps, RunAgents(run="mine", urls={}))
        assert run_agents.read(steps) is None


def test_the_record_is_the_same_in_every_version(tmp_path):
    run_agents.write(
        tmp_path, RunAgents(run="mine", urls={"00ff": "http://10.0.0.7:8470"})
    )
    written = (tmp_path / run_agents.FILE).read_bytes()
    assert written == BYTES


def test_an_altered_record_is_an_error_and_what_is_no_url_is_left_out(tmp_path):
    path = tmp_path / run_agents.FILE
    run_agents.write(tmp_path, RunAgents(run="mine", urls={**URLS, "x": "file:///etc"}))
    assert run_agents.read(tmp_path).urls == URLS
    path.write_bytes(path.read_bytes().replace(b"8470", b"8471"))
    with pytest.raises(errors.CheckpointError, match="was altered after it was saved"):
        run_agents.read(tmp_path)
