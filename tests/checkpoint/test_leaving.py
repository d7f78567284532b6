"""An exception or Ctrl-C in the block of a checkpointer: saves in flight are finished.

In one process here; `tests/processes/test_hosts.py` has several.
"""

import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import storage
from elastic_ckpt.tiers.choices import Local, Persistent
from tests import ctrl_c


class Slow:
    """A component whose state is written once it is released."""

    def __init__(self):
        self.released = threading.Event()

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            self.released.wait()
            (path / "state").write_text("whole")

        return write()

    async def load(self, directory):
        raise NotImplementedError


def opened(tmp_path, tiers):
    chosen = [Persistent(tmp_path / "steps", every=1)]
    chosen += [Local(tmp_path / "ram")] if tiers == "ram" else []
    return frontend.Checkpointer(chosen, run="run")


def stored(tmp_path):
    return [path.name for path in (tmp_path / "steps").iterdir() if path.name.isdigit()]


def leave(tmp_path, tiers, slow, error, on_error=lambda: None):
    """Saves three steps, and raises while the last one is not written."""
    with opened(tmp_path, tiers) as checkpointer:
        for step in (1, 2, 3):
            parts = {"state": {"w": jnp.arange(4.0)}}
            if step == 3:
                parts["slow"] = slow
            checkpointer.save_checkpointables_async(step, parts)
        on_error()
        raise error


@pytest.mark.parametrize("tiers", ["storage", "ram"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_save_in_flight_is_finished(tmp_path, tiers, kind):
    slow = Slow()
    threading.Timer(0.2, slow.released.set).start()
    with pytest.raises(kind, match="stop"):
        leave(tmp_path, tiers, slow, kind("stop"))
    assert "3" in stored(tmp_path)
    with opened(tmp_path, tiers) as again:
        assert again.latest.step == 3


def test_an_interrupted_wait_for_a_save_does_not_drop_it(tmp_path):
    slow = Slow()
    state = {"w": jnp.arange(4.0)}

    def save():
        with opened(tmp_path, "ram") as checkpointer:
            parts = {"state": state, "slow": slow}
            checkpointer.save_checkpointables_async(1, parts)
            threading.Timer(0.5, slow.released.set).start()
            ctrl_c.pressed_during(lambda: checkpointer.save_async(2, state))

    with pytest.raises(KeyboardInterrupt):
        save()
    assert stored(tmp_path) == ["1"]


def test_a_second_interruption_ends_the_wait(tmp_path):
    slow = Slow()

    def press():
        # While the end of the block waits, as soon as it says so.
        ctrl_c.pressed_during(lambda: None)

    with pytest.raises(KeyboardInterrupt) as caught:
        leave(tmp_path, "ram", slow, ValueError("stop"), on_error=press)
    assert str(caught.value.__context__) == "stop"
    # Its hosts were released, and what was whole is there.
    with opened(tmp_path, "ram") as again:
        assert again.latest.step == 2
        slow.released.set()


def test_a_save_that_cannot_be_finished_is_noted_at_the_error(tmp_path):
    def save():
        with opened(tmp_path, "ram") as checkpointer:
            checkpointer.wait()
            storage.remove(tmp_path / "steps")
            (tmp_path / "steps").write_text("not a directory")
            checkpointer.save_async(1, {"w": jnp.arange(4.0)})
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop") as caught:
        save()
    (note,) = caught.value.__notes__
    assert "saves in flight were not finished: " in note
    assert "step 1" in note


UNCLOSED = """
import sys
import jax.numpy as jnp
import elastic_ckpt as ec

def main(directory, error):
    tiers = [ec.Persistent(directory + "/steps", every=1)]
    if error == "ram":
        tiers.append(ec.Local(directory + "/ram"))
    checkpointer = ec.Checkpointer(tiers)
    for step in (1, 2, 3):
        checkpointer.save_async(step, {"w": jnp.full(100_000, step)})
    if error == "error":
        raise ValueError("stop")

main(*sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["storage", "ram", "error"])
def test_a_checkpointer_that_is_not_closed_loses_nothing(tmp_path, kind):
    ended = subprocess.run(
        [sys.executable, "-c", UNCLOSED, tmp_path, kind],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == (kind == "error")
    assert "3" in stored(tmp_path)
    assert ended.stderr.count("was not closed, and its saves are finished now") == 1
    assert "after interpreter shutdown" not in ended.stderr
    assert ended.stderr.count("Traceback") == (kind == "error")
