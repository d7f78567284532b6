"""A loop of saves in a real world, as of a training, to which something happens."""

import functools
import os
import pathlib
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import backup
from elastic_ckpt.core import errors, topology
from elastic_ckpt.steps import holdings, uploads
from elastic_ckpt.tiers.peers import agent
from elastic_ckpt.tiers.ram import ram_disk
from tests.faults import spoilt_files
from tests.multiprocess import tier_worlds

# The file with the ballast, in a slot without a process.
_BALLAST = "hosts/9/1-0/ballast"
_MOMENT_SECS = 0.01


def train(
    checkpointer, mesh, *, steps, happens, gates, paced, sharded=True, wrong=None
):
    """Saves step after step in the background.

    Args:
      checkpointer: of this host.
      mesh: of all devices.
      steps: to save, in order.
      happens: by step, what host 0 does before it, when all that was begun is done.
      gates: an empty directory, through which hosts wait for that.
      paced: whether a step is long enough for all that the save before it began.
      sharded: whether the state is sharded.
      wrong: a step and a host, of which one bit is wrong then.
    """
    own = topology.this_host()
    for step in steps:
        if step in happens:
            checkpointer.wait()
            _together(gates, step, own, happens[step])
        state = tier_worlds.state(mesh, step, sharded)
        if (step, own) == wrong:
            state["w"] = _with_a_wrong_bit(state["w"])
        parts = {"state": state, "data": tier_worlds.Counter(step)}
        assert checkpointer.save_checkpointables_async(step, parts) is not None
        if paced:
            checkpointer.wait()
    checkpointer.wait()
    if wrong is not None:
        _expect_backlog(checkpointer, step=wrong[0])


def _expect_backlog(checkpointer, *, step):
    # The wrong step is due in storage, and does not get there.
    due = f"step {step} was due in persistent storage"
    with pytest.raises(errors.CheckpointError, match=due):
        checkpointer.close()


def fail(checkpointer, mesh, *, host):
    """Saves a step; then one host fails, while the others save the next one."""
    tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    if topology.this_host() == host:
        raise RuntimeError("the loss is not a number")
    tier_worlds.save(checkpointer, mesh, steps=[2], sharded=True)


def take_away(directory):
    """A file is where the directory was."""
    os.rename(directory, f"{directory}-away")
    pathlib.Path(directory).write_text("not a directory")


def bring_back(directory):
    """Undoes that."""
    os.unlink(directory)
    os.rename(f"{directory}-away", directory)


def fill(root, *, limit_bytes, leave):
    """Fills a RAM disk to its limit, but for some bytes."""
    disk = ram_disk.RamDisk(root, run="run", limit_bytes=limit_bytes)
    ballast = pathlib.Path(root, _BALLAST)
    ballast.parent.mkdir(parents=True)
    ballast.write_bytes(bytes(disk.free_bytes() - leave))


def empty(root):
    """Undoes that."""
    shutil.rmtree(pathlib.Path(root, "hosts/9"))


def stop_agent(root):
    """The agent of a machine hangs."""
    os.kill(agent.find(root).pid, signal.SIGSTOP)


def continue_agent(root):
    """Undoes that."""
    os.kill(agent.find(root).pid, signal.SIGCONT)


def spoil_what_is_backed_up_next():
    """All that this host uploads next goes bad in its RAM before."""
    original = backup.HostBackup.back_up

    @functools.wraps(original)
    def back_up(self, step_id, names):
        backup.HostBackup.back_up = original
        sources = self._world.in_ram(step_id)
        together = holdings.Holdings.from_offers(list(sources))
        own = self._world.own
        share = set(
            uploads.uploads(together, self._world.hosts).items_of(own.host.id).tolist()
        )
        for row, item in enumerate(together.item.tolist()):
            is_own = together.offers[together.holder[row]].host.id == own.host.id
            if is_own and item in share and item < len(together.leaf):
                directory = own.disk.step_directory(own.slot, step_id)
                spoilt_files.change_first_byte(directory / together.fragment(row).file)
        return original(self, step_id, names)

    backup.HostBackup.back_up = back_up


def in_turn(*acts):
    """Does several things."""
    for act in acts:
        act()


def steps_of(root):
    """The steps of which the first process of a machine has something."""
    disk = ram_disk.RamDisk(root, run="run")
    return [step for step, _ in disk.saves(0)]


def expect_steps(root, expected):
    """Fails unless a machine has these steps."""
    assert steps_of(root) == expected, steps_of(root)


def _together(gates, step, own, act):
    gate = pathlib.Path(gates, str(step))
    if own == 0:
        act()
        gate.touch()
    while not gate.exists():
        time.sleep(_MOMENT_SECS)


def _with_a_wrong_bit(array):
    values = np.array(array.addressable_shards[0].data)
    values.view(np.uint32)[3, 5] ^= 1 << 7
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(
        array.shape, sharding, functools.partial(_part, values)
    )


def _part(whole, index):
    return whole[index]
