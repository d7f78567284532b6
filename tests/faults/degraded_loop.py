"""A loop of saves in a real world, as of a training, to which something happens."""

import os
import pathlib
import signal
import time

from elastic_ckpt.core import topology
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.ram import ram_disk
from tests.multiprocess import tier_worlds

_MOMENT_SECS = 0.01


def train(checkpointer, mesh, *, steps, happens, gates):
    """Saves step after step in the background.

    Args:
      checkpointer: of this host.
      mesh: of all devices.
      steps: to save, in order.
      happens: by step, what host 0 does before it, when all that was begun is done.
      gates: an empty directory, through which hosts wait for that.
    """
    own = topology.this_host()
    for step in steps:
        if step in happens:
            checkpointer.wait()
            _together(gates, step, own, happens[step])
        state = tier_worlds.state(mesh, step, True)
        parts = {"state": state, "data": tier_worlds.Counter(step)}
        assert checkpointer.save_checkpointables_async(step, parts) is not None
    checkpointer.wait()


def fail(checkpointer, mesh, *, host):
    """Saves a step; then one host fails, while the others save the next one."""
    tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    if topology.this_host() == host:
        raise RuntimeError("the loss is not a number")
    tier_worlds.save(checkpointer, mesh, steps=[2], sharded=True)


def stop_agent(root):
    """The agent of a machine hangs."""
    os.kill(agent.find(root).pid, signal.SIGSTOP)


def continue_agent(root):
    """Undoes that."""
    os.kill(agent.find(root).pid, signal.SIGCONT)


def in_turn(*acts):
    """Does several things."""
    for act in acts:
        act()


def expect_steps(root, expected):
    """Fails unless the first process of a machine has these steps."""
    steps = [step for step, _ in ram_disk.RamDisk(root, run="run").saves(0)]
    assert steps == expected, steps


def _together(gates, step, own, act):
    gate = pathlib.Path(gates, str(step))
    if own == 0:
        act()
        gate.touch()
    while not gate.exists():
        time.sleep(_MOMENT_SECS)
