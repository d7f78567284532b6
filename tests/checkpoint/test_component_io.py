"""Components: their state is taken at once, and written later.

If one raises or hangs, its step fails, and nothing else.
"""

import asyncio
import contextlib
import errno
import os
import threading
import tracemalloc

import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import errors
from tests.recorded_events import RecordedEvents

STATE = {"w": np.ones(2, np.float32)}


class Counter:
    """A component that counts."""

    def __init__(self, count=0):
        self.count = count

    async def save(self, directory):
        taken = self.count

        async def write():
            path = await (directory / "sub").await_creation()
            path.mkdir()
            (path / "count").write_text(str(taken))

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / "sub" / "count").read_text())

        return read()


class Silent:
    """A component that writes no file, such as an iterator without a position."""

    loaded = False

    async def save(self, directory):
        return directory.await_creation()

    async def load(self, directory):
        async def read():
            # Orbax commits each checkpointable with a file.
            names = {path.name for path in directory.iterdir()}
            assert names <= {"commit_success.txt"}
            self.loaded = True

        return read()


class Failing(Silent):
    """A component that writes half of its file, and then raises, or hangs.

    It does so in `save` or when the state is written; what hangs may block its loop.
    """

    save_timeout_secs = 0.2

    def __init__(self, error=None, *, at_once=False, blocks=False):
        self._error, self._at_once, self._blocks = error, at_once, blocks
        self.released, self.ended = threading.Event(), threading.Event()

    async def save(self, directory):
        async def write():
            await directory.await_creation()
            with contextlib.suppress(FileNotFoundError):
                (directory.path / "half").write_text("cut")
            if self._error:
                raise self._error
            try:
                if self._blocks:
                    self.released.wait()
                else:
                    await asyncio.sleep(3600)
            finally:
                self.ended.set()

        return await write() if self._at_once else write()


def test_the_state_is_that_of_the_call_and_not_of_the_writing(tmp_path):
    counter = Counter(3)
    trees, components = component_io.split({"state": {"w": 1}, "c": counter})
    assert (trees, components) == ({"state": {"w": 1}}, {"c": counter})
    write = component_io.begin_save(components, lambda _: epath.Path(tmp_path))
    counter.count = 4
    assert list(tmp_path.iterdir()) == []
    write()
    component_io.load(counter, tmp_path)
    assert counter.count == 3


def test_a_component_without_files_comes_back_also_to_orbax(make, tmp_path):
    with make() as saved:
        assert saved.save_checkpointables(1, {"state": STATE, "data": Silent()})
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        assert set(stock.checkpointables_metadata(1).metadata) == {"state", "data"}
        for opened in (make(), make(ram="another machine's ram"), stock):
            data = Silent()
            assert opened.load_checkpointables(1, {"data": data})["data"] is data
            assert data.loaded


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
FAILURES = {
    "a bug": (TypeError("no such thing"), "no such thing"),
    "a late bug": (ValueError("cut in two"), "cut in two"),
    "a service of its own": (REFUSED, "Connection refused"),
    "a timeout of its own": (TimeoutError("no answer"), "not written: no answer"),
    "some that hang": (None, r"\['data', 'more'\] were not saved in time"),
}


@pytest.mark.parametrize(
    ("name", "ram"), [*((name, "ram") for name in FAILURES), ("a late bug", None)]
)
def test_a_component_that_fails_is_not_blamed_on_storage(name, ram, make):
    error, message = FAILURES[name]
    recorded = RecordedEvents()
    checkpointer = make(ram=ram, emit=recorded)
    assert checkpointer.save(1, STATE)
    at_once = name in ("a bug", "a service of its own")
    failing = Failing(error, at_once=at_once)
    checkpointables = {
        "state": STATE,
        "silent": Silent(),
        "data": failing,
        "more": failing,
    }
    if name == "a bug":
        with pytest.raises(TypeError, match=message):
            checkpointer.save_checkpointables(2, checkpointables)
    else:
        assert not checkpointer.save_checkpointables(2, checkpointables)
    with pytest.raises(errors.CheckpointError, match=message) as caught:
        checkpointer.close()
    told = str(caught.value)
    assert told.startswith("step 2 was due in persistent storage but is not there: it")
    assert "fix the component" in told
    assert "no tier has it" in told
    for elsewhere in ("storage back", "faster storage", "hosts' RAM", "bring it"):
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


def test_a_component_that_blocks_fails_its_step_alone(make, tmp_path):
    checkpointer = make()
    hanging = Failing(at_once=True, blocks=True)
    try:
        assert not checkpointer.save_checkpointables(1, {"slow": hanging})
    finally:
        hanging.released.set()
    # The abandoned save ends meanwhile, and leaves no file.
    assert hanging.ended.wait(60)
    assert checkpointer.save_checkpointables(2, {"state": STATE, "data": Silent()})
    checkpointer.wait()
    assert [path.name[0] for path in tmp_path.glob("ram/hosts/0/[0-9]*")] == ["2"]
    assert not list(tmp_path.rglob("half"))


def test_a_component_costs_one_copy_of_its_values(make):
    checkpointer = make()
    values = np.arange(2**22, dtype=np.float64)
    part = Component({"values": values}, "global")

    def cost(call):
        tracemalloc.start()
        try:
            call(2, {"part": part})
            checkpointer.wait()
            return tracemalloc.get_traced_memory()[1] / values.nbytes
        finally:
            tracemalloc.stop()

    # Files are written and read in pieces of 16 MiB at most.
    most = 1 + 2**24 / values.nbytes + 0.1
    assert cost(checkpointer.save_checkpointables) < most
    part.state = None
    assert cost(checkpointer.load_checkpointables) < most
    assert (part.state["values"] == values).all()
