"""A node that is replaced is filled from its peers, though no host restores anything.

An agent of a node is a process with a directory in /dev/shm. It is killed with all that
the memory of its node holds.
"""

import contextlib
import functools
import os
import shutil
import time

import pytest

from elastic_ckpt.checkpoint.host import refill
from elastic_ckpt.tiers.ram import ram_disk
from tests import shared_memory
from tests.checkpoint.host import test_refill
from tests.multiprocess import tier_worlds
from tests.multiprocess.test_elastic_ram import restored, saved
from tests.tiers import served

STEP = 4
LIMIT_SECS = 1200
VERB = ("elastic_ckpt.cli.main", "agent")


@contextlib.contextmanager
def node(directory):
    """A node with its agent, and at the end without all that it had."""
    os.mkdir(directory)
    with served.agent_process(directory, "--node", verb=VERB) as (process, _):
        yield os.path.join(directory, "run")
        process.kill()
        process.wait()
    shutil.rmtree(directory)


def wait_for_copies(checkpointer, mesh, *, root):
    """Restores nothing, and returns when a replaced node has a step."""
    del checkpointer, mesh
    disk = ram_disk.RamDisk(root, run="run")
    deadline = time.monotonic() + LIMIT_SECS
    while not disk.known_saves():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_copies_return_to_a_node_that_was_killed_before_a_host_restores(tmp_path):
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(shared_memory.directory("nodes"))
        kept, replaced = (os.path.join(base, name) for name in "ab")

        def world(work, *roots):
            return tier_worlds.run(
                work,
                num_hosts=len(roots),
                directories=roots,
                logs=tmp_path / "logs",
                copies=1,
                slices=len(roots),
            )

        def parts(root):
            return test_refill.parts(ram_disk.RamDisk(root, run="run"), STEP)

        with node(kept) as first:
            with node(replaced) as second:
                world(saved([STEP], sharded=True), first, second)
                before = parts(second)
                assert before == parts(first)
            with node(replaced) as second:
                waiting = functools.partial(wait_for_copies, root=second)
                world(waiting, first, second)
                assert parts(second) == before
                ((slot, step_id),) = ram_disk.RamDisk(second, run="run").all_saves()
                assert (slot, step_id.step) == (refill.SLOT, STEP)
                # Now the other node is lost, and nothing is missing.
                os.rename(first, f"{kept}-lost")
                events = world(restored(STEP, sharded=True), second)
                assert "restored_from" in {each["event"] for each in events}
