"""Peers that are slow at random, or for a while: no step is lost, and no backup."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import threading

import pytest

from elastic_ckpt.checkpoint.host import backup
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent
from tests.faults import middleman
from tests.multiprocess import machines as separate_machines
from tests.multiprocess import tier_worlds
from tests.sidecar import simulated_hosts

TIMEOUT_SECS = 0.25


@pytest.fixture
def machines():
    with simulated_hosts.Machines() as simulated:
        yield simulated


@contextlib.contextmanager
def slow_at_random(machines, numbers, *, seed):
    """The agents of machines let some requests wait until clients have given up."""
    generator = random.Random(seed)

    def late_secs():
        return 2 * TIMEOUT_SECS * (generator.random() < 0.3)

    with contextlib.ExitStack() as stack:
        for number in numbers:
            directory = machines.directory(number)
            stack.enter_context(middleman.instead_of(directory, late_secs=late_secs))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_step_is_lost_where_all_peers_are_slow_at_random(machines, tmp_path, seed):
    storage = str(tmp_path / "steps")
    with slow_at_random(machines, range(4), seed=seed):
        with simulated_hosts.world(
            machines, 4, copies=0, persistent=storage, timeout_secs=TIMEOUT_SECS
        ) as (checkpointer, mesh, recorded):
            for step in range(1, 4):
                tier_worlds.save(checkpointer, mesh, steps=[step], sharded=True)
        stored = [each["step"] for each in recorded if each["event"] == "backed_up"]
        assert stored == [1, 2, 3]
        # Half of the machines are idle now, and all parts are in memory alone.
        for num_hosts in (2, 4):
            with simulated_hosts.world(
                machines, num_hosts, copies=0, timeout_secs=TIMEOUT_SECS
            ) as (checkpointer, mesh, recorded):
                tier_worlds.restore(checkpointer, mesh, step=3, sharded=True)
            names = {each["event"] for each in recorded}
            assert "step_passed_over" not in names


@pytest.fixture
def served():
    """Machines whose agents are separate processes."""
    with separate_machines.Machines() as started:
        started.start_agents(range(2))
        yield started


@contextlib.contextmanager
def stopped(served, number, *, secs=None):
    """The agent of a machine is stopped, for a while or as long as the block lasts."""
    pid = agent.find(served.directory(number)).pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(secs or 0.0, os.kill, (pid, signal.SIGCONT))
    if secs is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if secs is not None:
            timer.join()
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def killed(served, number):
    """The agent of a machine is killed, and started again when the block ends."""
    served.stop_agent(number)
    try:
        yield
    finally:
        served.start_agents([number])


@pytest.mark.slow
@pytest.mark.parametrize(
    "without_agent",
    [stopped, killed],
)
def test_the_last_backup_does_not_depend_on_the_agent_of_a_living_host(
    served, tmp_path, without_agent
):
    tiers = {"persistent": str(tmp_path / "steps"), "timeout_secs": 1.0}
    for number in range(2):
        with (
            contextlib.ExitStack() as until_closed,
            simulated_hosts.world(served, 2, copies=0, **tiers) as opened,
        ):
            until_closed.enter_context(without_agent(served, number))
            checkpointer, mesh, recorded = opened
            tier_worlds.save(checkpointer, mesh, steps=[number + 1], sharded=True)
        stored = [each["step"] for each in recorded if each["event"] == "backed_up"]
        assert stored == [number + 1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_start_does_not_depend_on_the_agent_of_a_living_host(served, number):
    tiers = {"copies": 0, "timeout_secs": 1.0}
    with simulated_hosts.world(served, 2, **tiers) as (checkpointer, mesh, _):
        tier_worlds.save(checkpointer, mesh, steps=[1, 2], sharded=True)
    with (
        stopped(served, number),
        simulated_hosts.world(served, 2, **tiers) as (checkpointer, mesh, recorded),
    ):
        tier_worlds.restore(checkpointer, mesh, step=2, sharded=True)
    assert "step_passed_over" not in {each["event"] for each in recorded}


@pytest.mark.slow
def test_a_start_waits_for_an_idle_machine_whose_agent_is_stopped_for_a_while(served):
    tiers = {"copies": 0, "timeout_secs": 2.0}
    with simulated_hosts.world(served, 2, **tiers) as (checkpointer, mesh, _):
        tier_worlds.save(checkpointer, mesh, steps=[1, 2], sharded=True)
    with (
        stopped(served, 1, secs=3.0),
        simulated_hosts.world(served, 1, **tiers) as (checkpointer, mesh, recorded),
    ):
        tier_worlds.restore(checkpointer, mesh, step=2, sharded=True)
    assert "step_passed_over" not in {each["event"] for each in recorded}


@pytest.mark.slow
def test_a_backup_that_would_lack_parts_is_not_begun(machines, tmp_path, monkeypatch):
    original = backup.HostBackup.offer

    @functools.wraps(original)
    def offer(host, **arguments):
        for each in pathlib.Path(machines.directory(1)).glob("hosts/0/1-*/manifest-*"):
            each.unlink()
        return original(host, **arguments)

    monkeypatch.setattr(backup.HostBackup, "offer", offer)
    tiers = {"copies": 0, "persistent": str(tmp_path / "steps")}
    world = simulated_hosts.world(machines, 2, **tiers)
    checkpointer, mesh, recorded = world.__enter__()
    state = tier_worlds.state(mesh, 1, True)
    assert checkpointer.save_checkpointables(1, {"state": state})
    due = r"step 1 was due .* host 0: step 1 in local lacks parts of .*no host has"
    with pytest.raises(errors.CheckpointError, match=due):
        world.__exit__(None, None, None)
    assert "backed_up" not in {each["event"] for each in recorded}
    assert not list((tmp_path / "steps").glob("*1*/*"))
