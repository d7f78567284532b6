"""Peers that hang, lie or are slow: no step waits for them, and none is lost.

`tests/checkpoint/test_stages.py` has what goes wrong in each stage.
"""

import contextlib
import functools
import os
import pathlib
import re
import signal
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, topology
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.ram import ram_disk
from tests.processes import machines, middleman, tier_worlds
from tests.processes.test_memory import on, reasons, restored, saved
from tests.sidecar import simulated_hosts

# Before these steps the agent of a machine stops, and goes on.
STOPPED, CONTINUED = 3, 7


@pytest.fixture
def ram():
    """Machines whose agents are separate processes."""
    with machines.Machines() as started:
        started.start_agents(range(4))
        yield started


@pytest.fixture
def simulated():
    """Machines whose agents are in this process."""
    with simulated_hosts.Machines() as started:
        yield started


def save_while_an_agent_hangs(checkpointer, mesh, *, root, of_host_0, gates):
    """Saves step after step in the background; host 0 stops the agent meanwhile."""
    own = topology.this_host()
    for step in range(1, 10):
        if step in (STOPPED, CONTINUED):
            checkpointer.wait()
            gate = pathlib.Path(gates, str(step))
            if own == 0:
                if step == CONTINUED:
                    # The last step that has its copies stays beside the newest.
                    saves = ram_disk.RamDisk(of_host_0, run="run").saves(0)
                    assert [each for each, _ in saves] == [STOPPED - 1, CONTINUED - 1]
                sent = signal.SIGSTOP if step == STOPPED else signal.SIGCONT
                os.kill(agent.find(root).pid, sent)
                gate.touch()
            while not gate.exists():
                time.sleep(0.01)
        state = tier_worlds.state(mesh, step, True)
        checkpointables = {"state": state, "data": tier_worlds.Counter(step)}
        assert (
            checkpointer.save_checkpointables_async(step, checkpointables) is not None
        )
    checkpointer.wait()


def steps(events, name):
    return [each["step"] for each in events if each["event"] == name]


@pytest.mark.slow
def test_an_agent_hangs_for_a_while_and_its_host_does_without(ram, tmp_path):
    train = functools.partial(
        save_while_an_agent_hangs,
        root=ram.directory(1),
        of_host_0=ram.directory(0),
        gates=str(tmp_path),
    )
    events = on(ram, range(4), train, tmp_path, slices=2, timeout_secs=3.0)
    assert steps(events, "saved") == list(range(1, 10))
    whys = reasons(events, "degraded")
    assert any(
        why.startswith("the list of host") and "timed out" in why for why in whys
    ), whys
    # What its machine has is lacked by nobody else.
    ram.lose(2)
    on(ram, [0, 1, 3], restored(9), tmp_path)


@pytest.mark.slow
def test_a_peer_that_lies_is_believed_nothing(ram, tmp_path):
    liar = pathlib.Path(ram.directory(1), "machine").read_text()
    with middleman.instead_of(ram.directory(1), lie=middleman.flip_values):
        events = on(ram, range(4), saved([1, 2]), tmp_path, slices=2)
        assert steps(events, "saved") == [1, 2]
        assert any(
            f"at host {liar}.0 it is not what was saved: its digest differs" in why
            for why in reasons(events, "degraded")
        )
        # Parts that only this host had were copied nowhere.
        with pytest.raises(errors.RunError, match=r"no good copy of .* is left"):
            on(ram, [0, 2, 3], restored(2), tmp_path)
    # Its own reads return the true values.
    on(ram, range(4), restored(2), tmp_path)


def test_a_host_without_room_for_copies_is_named_before_they_are_sent(simulated):
    # Each host saves 2 MiB. On one the rest of its limit is too small for a copy.
    full = pathlib.Path(simulated.directory(1), "hosts/9/others/taken")
    full.parent.mkdir(parents=True)
    full.write_bytes(bytes(5 * 2**20))
    limit_bytes = 8 * 2**20
    tiers = {"copies": 1, "limit_bytes": limit_bytes}
    opened = simulated_hosts.world(simulated, 2, slices=2, **tiers)
    with opened as (checkpointer, mesh, told):
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        state = {"w": jax.device_put(np.ones(2**20, np.float32), sharding)}
        checkpointer.save(1, state)
        checkpointer.wait()
    (why,) = reasons(told, "degraded")
    needs = rf"needs {2**21} bytes in .*/machine-1 \(limit {limit_bytes} bytes\)"
    assert re.search(rf"host 1: .*{needs}, but only \d+ are free", why)
    # It holds its own part alone.
    held = {path.name for path in full.parents[2].glob("0/1-*/**/c/*")}
    assert held == {"4", "5", "6", "7"}


def test_a_new_machine_with_a_secret_of_its_own_takes_that_of_the_run(simulated):
    with simulated_hosts.world(simulated, 4, slices=2) as (checkpointer, mesh, _):
        tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    simulated.lose(0)
    # Its agent has made one, as the agent of a node does.
    simulated.directory(0)
    with simulated_hosts.world(simulated, 2) as (checkpointer, mesh, told):
        tier_worlds.restore(checkpointer, mesh, step=1, sharded=True)
    assert not any("secret" in why for why in reasons(told, "degraded"))


@contextlib.contextmanager
def stopped(ram, number):
    """The agent of a machine is stopped while the block lasts."""
    pid = agent.find(ram.directory(number)).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def killed(ram, number):
    """The agent of a machine is killed, and started again when the block ends."""
    ram.stop_agent(number)
    try:
        yield
    finally:
        ram.start_agents([number])


@pytest.mark.slow
@pytest.mark.parametrize("without_agent", [stopped, killed])
def test_the_last_backup_does_not_depend_on_the_agent_of_a_living_host(
    ram, tmp_path, without_agent
):
    tiers = {"persistent": str(tmp_path / "steps"), "timeout_secs": 1.0}
    for number in range(2):
        with (
            contextlib.ExitStack() as until_closed,
            simulated_hosts.world(ram, 2, copies=0, **tiers) as opened,
        ):
            until_closed.enter_context(without_agent(ram, number))
            checkpointer, mesh, recorded = opened
            tier_worlds.save(checkpointer, mesh, steps=[number + 1], sharded=True)
        assert steps(recorded, "backed_up") == [number + 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 1])
@pytest.mark.parametrize("copies", [1, 0])
def test_a_machine_whose_agent_is_stopped_counts_as_absent(ram, copies, num_hosts):
    # Of a living host, or of one that the next world does without.
    tiers = {"copies": copies, "timeout_secs": 1.0}
    with simulated_hosts.world(ram, 2, **tiers) as (checkpointer, mesh, _):
        tier_worlds.save(checkpointer, mesh, steps=[1, 2], sharded=True)
    with (
        stopped(ram, 1),
        simulated_hosts.world(ram, num_hosts, **tiers) as (checkpointer, mesh, told),
        contextlib.ExitStack() as refused,
    ):
        if not copies:
            lost = pytest.raises(errors.CheckpointError, match="timed out")
            refused.enter_context(lost)
        tier_worlds.restore(checkpointer, mesh, step=2, sharded=True)
        assert not steps(told, "step_passed_over")
