"""Components that write no file, raise or hang: their step fails, and nothing else."""

import asyncio
import contextlib
import errno
import os
import threading
import tracemalloc

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import errors, host_memory
from tests.recorded_events import RecordedEvents


class Silent:
    """A component that writes no file, such as an iterator without a position."""

    loaded = False

    async def save(self, directory):
        async def write():
            await directory.await_creation()

        return write()

    async def load(self, directory):
        async def read():
            # Orbax commits each part of a step with a file.
            names = {path.name for path in directory.iterdir()}
            assert names <= {"commit_success.txt"}
            self.loaded = True

        return read()


class Failing(Silent):
    """A component that raises, or hangs until it is released.

    Args:
      error: that it raises; None has it hang.
      at_once: whether `save` does so, and not the writing of the state.
      blocks: whether it blocks its event loop.
    """

    save_timeout_secs = 0.2

    def __init__(self, error=None, *, at_once=False, blocks=False):
        self._error = error
        self._at_once = at_once
        self._blocks = blocks
        self.released, self.ended = threading.Event(), threading.Event()

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            if not self._at_once:
                await self._fail()
            with contextlib.suppress(FileNotFoundError):
                (path / "half").write_text("late")

        if self._at_once:
            with contextlib.suppress(FileNotFoundError):
                (directory.path / "half").write_text("cut")
            await self._fail()
        return write()

    async def _fail(self):
        if self._error:
            raise self._error
        try:
            if self._blocks:
                self.released.wait()
            else:
                await asyncio.sleep(3600)
        finally:
            self.ended.set()


class Whole(Silent):
    """A component that begins to save, and would write a file."""

    async def save(self, directory):
        async def write():
            await directory.await_creation()
            raise AssertionError("a step that is given up is not written")

        return write()


STATE = {"w": np.ones(2, np.float32)}


def left(tmp_path):
    """The steps in RAM, and parts of steps that were given up."""
    slot = tmp_path / "ram" / "hosts" / "0"
    there = [path.name.partition("-")[0] for path in slot.glob("[0-9]*")]
    return there, list(tmp_path.rglob("half"))


def test_a_component_without_files_comes_back_also_to_orbax(make, tmp_path):
    with make() as saved:
        assert saved.save_checkpointables(1, {"state": STATE, "data": Silent()})
    for ram in ("ram", "another machine's ram"):
        data = Silent()
        with make(ram=ram) as opened:
            restored = opened.load_checkpointables(None, {"state": STATE, "data": data})
        assert restored["data"] is data
        assert data.loaded
        assert restored["state"]["w"].tolist() == [1, 1]
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        data = Silent()
        assert set(stock.checkpointables_metadata(1).metadata) == {"state", "data"}
        stock.load_checkpointables(1, {"data": data})
        assert data.loaded


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
FAILURES = {
    "a bug": (TypeError("no such thing"), "no such thing"),
    "a late bug": (ValueError("cut in two"), "cut in two"),
    "a service of its own": (REFUSED, "Connection refused"),
    "a wrong state": (errors.DataError("no position"), "no position"),
    "one that hangs": (None, r"\['data'\] were not saved in time"),
}


@pytest.mark.parametrize(
    ("name", "ram"), [*((name, "ram") for name in FAILURES), ("a late bug", None)]
)
def test_a_component_that_fails_is_not_blamed_on_storage(name, ram, make):
    error, message = FAILURES[name]
    recorded = RecordedEvents()
    checkpointer = make(ram=ram, emit=recorded)
    assert checkpointer.save(1, STATE)
    parts = {"state": STATE, "data": Failing(error, at_once=name == "a bug")}
    if name == "a bug":
        with pytest.raises(TypeError, match=message):
            checkpointer.save_checkpointables(2, parts)
    else:
        assert not checkpointer.save_checkpointables(2, parts)
    with pytest.raises(errors.CheckpointError, match=message) as caught:
        checkpointer.close()
    told = str(caught.value)
    assert told.startswith("step 2 was due in persistent storage and is not there: it")
    assert "correct the component" in told
    assert "no tier has it" in told
    for elsewhere in ("storage back", "faster storage", "RAM has", "bring it"):
        assert elsewhere not in told
    assert [each["cause"] for each in recorded.named("degraded")] == ["component"]
    with make(ram=ram, emit=recorded) as checkpointer:
        assert checkpointer.latest.step == 1
        assert not checkpointer.save_checkpointables(2, {"data": Failing(REFUSED)})
        assert checkpointer.save(3, STATE)
        checkpointer.wait()
        assert checkpointer.is_durable(3)
    # Storage had not failed, so it does not recover.
    assert not recorded.named("storage_recovered")


def test_the_memory_of_a_step_that_failed_is_used_again(make, tmp_path, monkeypatch):
    allocated, allocate = [], host_memory.allocate
    monkeypatch.setattr(
        host_memory, "allocate", lambda n: (allocated.append(n), allocate(n))[1]
    )
    checkpointer = make(every=None)
    tree = {"large": np.zeros(2**20, np.uint8), "small": np.zeros(8)}
    for step in (1, 2):
        failing = Failing(OSError("disk full"), at_once=True)
        parts = {"state": tree, "first": Whole(), "second": failing}
        # Full storage is no reason to stop the training.
        assert not checkpointer.save_checkpointables(step, parts)
        checkpointer.wait()
    assert checkpointer.save(3, tree)
    assert len(allocated) == 1
    assert left(tmp_path) == (["3"], [])


@pytest.mark.parametrize(("at_once", "blocks"), [(True, True), (False, False)])
def test_a_component_that_hangs_fails_its_step_alone(make, tmp_path, at_once, blocks):
    checkpointer = make()
    hanging = Failing(at_once=at_once, blocks=blocks)
    parts = {"state": STATE, "slow": hanging, "data": Silent()}
    try:
        assert not checkpointer.save_checkpointables(1, parts)
    finally:
        hanging.released.set()
    # The abandoned save ends meanwhile, and leaves no file.
    assert hanging.ended.wait(60)
    assert checkpointer.save_checkpointables(2, {"state": STATE, "data": Silent()})
    checkpointer.wait()
    assert left(tmp_path) == (["2"], [])


def test_a_component_costs_one_copy_of_its_values(make):
    checkpointer = make()
    values = np.arange(2**22, dtype=np.float64)
    part = Component({"values": values}, "global")

    def cost(call):
        tracemalloc.start()
        try:
            call()
            checkpointer.wait()
            return tracemalloc.get_traced_memory()[1] / values.nbytes
        finally:
            tracemalloc.stop()

    # Files are written and read in pieces of 16 MiB at most.
    most = 1 + 2**24 / values.nbytes + 0.1
    assert cost(lambda: checkpointer.save_checkpointables(2, {"part": part})) < most
    part.state = None
    assert cost(lambda: checkpointer.load_checkpointables(2, {"part": part})) < most
    assert (part.state["values"] == values).all()
