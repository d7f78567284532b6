"""A host that cannot capture a step or save a component fails that step alone."""

import asyncio
import functools
import gc
import pathlib
import time
import weakref

import pytest

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import host_memory, topology
from tests.multiprocess import machines, tier_worlds

# By step: the host that fails, its error, and when that is raised.
FAILURES = {
    2: (1, TypeError, "no such thing", "begin"),
    3: (0, OSError, "disk full", "begin"),
    4: (2, ValueError, "cut in two", "background"),
    5: (0, TypeError, "not that either", "begin"),
    6: (1, TypeError, "no memory", "capture"),
    7: (0, OSError, "no directory", "capture"),
    8: (1, None, "components ['more'] were not saved in time", "hangs at once"),
    9: (0, None, "components ['more'] were not saved in time", "hangs later"),
}
LAST = 10


class Failing(tier_worlds.Counter):
    """A component that writes half of its files."""

    def __init__(self, error, message, *, in_background):
        self._error = error
        self._message = message
        self._in_background = in_background

    async def save(self, directory):
        async def write():
            (directory.path / "half").write_text("cut")
            raise self._error(self._message)

        if self._in_background:
            return write()
        return await write()


class Hanging(tier_worlds.Counter):
    """A component that does not return."""

    save_timeout_secs = 1.0

    def __init__(self, *, in_background):
        self._in_background = in_background

    async def save(self, directory):
        async def write():
            (directory.path / "half").write_text("cut")
            await asyncio.sleep(3600)

        if self._in_background:
            return write()
        await write()


class Taken:
    """The host memory that this process has taken from pools and not given back."""

    def __init__(self):
        self.num_bytes = self.most_bytes = 0
        take, give_back = host_memory.Pool.take, host_memory.Pool.give_back

        def counted_take(pool, num_bytes):
            self.num_bytes += num_bytes
            self.most_bytes = max(self.most_bytes, self.num_bytes)
            return take(pool, num_bytes)

        def counted_give_back(pool, memory):
            self.num_bytes -= memory.nbytes
            give_back(pool, memory)

        host_memory.Pool.take = counted_take
        host_memory.Pool.give_back = counted_give_back


def fail_and_go_on(checkpointer, mesh, *, directories):
    """Saves a step, fails to save the next ones, and saves the one after them."""
    taken = Taken()
    tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    slot = pathlib.Path(directories[topology.this_host()], "hosts", "0")
    captured = capture.capture
    for step, (host, error, message, moment) in FAILURES.items():
        state = tier_worlds.state(mesh, step, True)
        # Copied whole: only arrays of JAX may be held without a copy.
        state["copied"] = tier_worlds.values("w", step)
        held = [weakref.ref(state["w"])]
        parts = {"state": state, "data": tier_worlds.Counter(step)}
        parts["more"] = tier_worlds.Counter(step)
        fails = topology.this_host() == host
        if fails and moment == "capture":
            capture.capture = functools.partial(_fail, error, message)
        elif fails and error is None:
            parts["more"] = Hanging(in_background=moment == "hangs later")
        elif fails:
            in_background = moment == "background"
            parts["more"] = Failing(error, message, in_background=in_background)
        raises = fails and error is TypeError
        raised = ""
        try:
            assert not checkpointer.save_checkpointables(step, parts)
        except TypeError as raised_error:
            raised = str(raised_error)
        capture.capture = captured
        assert raised == (message if raises else "")
        checkpointer.wait()
        assert checkpointer.latest.step == 1
        assert list(slot.glob(f"{step}-*")) == []
        assert list(slot.rglob("half")) == []
        if moment != "capture":
            assert taken.most_bytes >= state["copied"].nbytes
        assert taken.num_bytes == 0
        del state, parts
        _wait_until_gone(held)
    tier_worlds.save(checkpointer, mesh, steps=[LAST], sharded=True)
    assert taken.num_bytes == 0
    tier_worlds.restore(checkpointer, mesh, step=LAST, sharded=True)


def _fail(error, message, *_):
    raise error(message)


def _wait_until_gone(held):
    # A thread that is done may still be about to end.
    deadline = time.monotonic() + 60
    while any(each() is not None for each in held):
        gc.collect()
        assert time.monotonic() < deadline, "the arrays of the step are still held"
        time.sleep(0.01)


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


def test_one_host_that_cannot_save_stops_no_other(ram, tmp_path):
    ram.start_agents(range(3))
    directories = [ram.directory(number) for number in range(3)]
    events = tier_worlds.run(
        functools.partial(fail_and_go_on, directories=directories),
        num_hosts=3,
        directories=directories,
        logs=tmp_path / "logs",
        persistent=str(tmp_path / "steps"),
    )
    for step, (host, _, message, _) in FAILURES.items():
        reported = [each for each in events if each.get("step") == step]
        assert [each["event"] for each in reported] == ["save_started", "degraded"]
        why = reported[1]["why"]
        assert why.startswith("it was not saved: ")
        assert f"host {host}" in why
        assert message in why
    stored = {each.name for each in (tmp_path / "steps").iterdir() if each.is_dir()}
    assert {name for name in stored if name[:1].isdecimal()} == {"1", str(LAST)}
    assert list((tmp_path / "steps").rglob("half")) == []
