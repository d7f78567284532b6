"""An exception or Ctrl-C in the block of a checkpointer: saves in flight are finished.

In one process here; `tests/processes/test_hosts.py` has several.
"""

import subprocess
import sys
import threading

import pytest

from elastic_ckpt import frontend
from elastic_ckpt.tiers.choices import Local, Persistent
from tests import ctrl_c
from tests.checkpoint.test_checkpointer import stored
from tests.checkpoint.test_component_io import STATE, Silent


class Slow(Silent):
    """A component whose state is written once it is released."""

    def __init__(self):
        self.released = threading.Event()

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            self.released.wait()
            (path / "state").write_text("whole")

        return write()


def leave(checkpointer, slow, error, act=lambda: None):
    """Saves two steps, and raises while the last one is not written."""
    with checkpointer:
        checkpointer.save_async(1, STATE)
        checkpointer.save_checkpointables_async(2, {"state": STATE, "slow": slow})
        act()
        raise error


@pytest.mark.parametrize(
    ("kind", "ram"),
    [(ValueError, "ram"), (KeyboardInterrupt, None), (SystemExit, "ram")],
)
def test_a_save_in_flight_is_finished(make, tmp_path, ram, kind):
    slow = Slow()
    threading.Timer(0.1, slow.released.set).start()
    with pytest.raises(kind, match="stop"):
        leave(make(ram=ram), slow, kind("stop"))
    assert 2 in stored(tmp_path)
    assert make(ram=ram).latest.step == 2


def test_a_second_interruption_ends_the_wait(tmp_path):
    slow, tiers = Slow(), [Local(tmp_path / "ram"), Persistent(tmp_path, every=1)]

    def press():
        # While the end of the block waits, as soon as it says so.
        ctrl_c.pressed_during(lambda: None)

    with pytest.raises(KeyboardInterrupt) as caught:
        leave(frontend.Checkpointer(tiers), slow, ValueError("stop"), press)
    assert str(caught.value.__context__) == "stop"
    # Its hosts were released, and what was whole is there.
    with frontend.Checkpointer(tiers) as again:
        assert again.latest.step == 1
        slow.released.set()


UNCLOSED = """
import sys
import jax.numpy as jnp
import elastic_ckpt as ec

checkpointer = ec.Checkpointer([ec.Persistent(sys.argv[1] + "/steps", every=1)])
for step in (1, 2, 3):
    checkpointer.save_async(step, {"w": jnp.full(100_000, step)})
raise ValueError("stop")
"""


@pytest.mark.slow
def test_a_program_that_fails_and_closes_nothing_loses_no_save(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert 3 in stored(tmp_path)
    assert ended.stderr.count("was not closed, and its saves are finished now") == 1
    assert ended.stderr.count("Traceback") == 1
