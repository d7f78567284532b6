"""Components that write no file, or whose `save` raises, in every tier."""

import asyncio
import contextlib
import pathlib
import threading
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import host_memory
from elastic_ckpt.tiers.choices import Local, Persistent


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


class Failing:
    """A component whose `save` raises."""

    def __init__(self, error):
        self.error = error

    async def save(self, directory):
        (directory.path / "half").write_text("cut")
        raise self.error

    async def load(self, directory):
        raise NotImplementedError


class Whole:
    """A component that begins to save, and would write a file."""

    async def save(self, directory):
        async def write():
            await directory.await_creation()
            raise AssertionError("a step that is given up is not written")

        return write()

    async def load(self, directory):
        raise NotImplementedError


class Hanging:
    """A component that hangs until it is released.

    Args:
      in_background: whether the writing of the state hangs, not the taking of it.
      blocks: whether it blocks its event loop.
    """

    save_timeout_secs = 0.2

    def __init__(self, *, in_background, blocks):
        self._in_background = in_background
        self._blocks = blocks
        self.released, self.ended = threading.Event(), threading.Event()

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            if self._in_background:
                await self._hang()
            with contextlib.suppress(FileNotFoundError):
                (path / "half").write_text("late")

        if not self._in_background:
            await self._hang()
        return write()

    async def _hang(self):
        try:
            if self._blocks:
                self.released.wait()
            else:
                await asyncio.sleep(3600)
        finally:
            self.ended.set()

    async def load(self, directory):
        raise NotImplementedError


@pytest.fixture
def make(tmp_path):
    made = []

    def make(local="ram", *, stored=True):
        tiers = [Local(tmp_path / local)]
        tiers += [Persistent(tmp_path / "steps", every=1)] if stored else []
        made.append(frontend.Checkpointer(tiers, run="run"))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


def files_below(directory):
    return list(pathlib.Path(directory).rglob("half"))


def test_a_component_without_files_comes_back_also_to_orbax(make, tmp_path):
    saved = make()
    parts = {"state": {"w": jnp.arange(4.0)}, "data": Silent()}
    assert saved.save_checkpointables(1, parts)
    saved.close()
    for local in ("ram", "another machine's ram"):
        data = Silent()
        with make(local) as opened:
            restored = opened.load_checkpointables(
                None, {"state": {"w": jnp.zeros(4)}, "data": data}
            )
        assert restored["data"] is data
        assert data.loaded
        assert restored["state"]["w"].tolist() == [0, 1, 2, 3]
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        data = Silent()
        assert set(stock.checkpointables_metadata(1).metadata) == {"state", "data"}
        stock.load_checkpointables(1, {"data": data})
        assert data.loaded


@pytest.mark.parametrize("error", [TypeError("no such thing"), OSError("disk full")])
def test_a_component_that_cannot_save_fails_its_step_alone(
    make, tmp_path, error, monkeypatch
):
    allocated = []
    allocate = host_memory.allocate
    monkeypatch.setattr(
        host_memory, "allocate", lambda n: (allocated.append(n), allocate(n))[1]
    )
    checkpointer = make(stored=False)
    tree = {"large": np.zeros(2**20, np.uint8), "small": np.zeros(8)}
    parts = {"state": tree, "first": Whole(), "second": Failing(error)}
    for step in (1, 2):
        if isinstance(error, OSError):
            # Full storage is no reason to stop the training.
            assert not checkpointer.save_checkpointables(step, parts)
        else:
            with pytest.raises(TypeError, match="no such thing"):
                checkpointer.save_checkpointables(step, parts)
        checkpointer.wait()
        assert files_below(tmp_path) == []
    slot = tmp_path / "ram" / "hosts" / "0"
    assert [path.name for path in slot.iterdir() if path.is_dir()] == []
    assert checkpointer.save(3, tree)
    # The memory of a step that failed is used again by the next.
    assert len(allocated) == 1


@pytest.mark.parametrize(("in_background", "blocks"), [(False, True), (True, False)])
def test_a_component_that_hangs_fails_its_step_alone(
    make, tmp_path, in_background, blocks
):
    checkpointer = make()
    tree = {"w": np.zeros(8, np.uint8)}
    hanging = Hanging(in_background=in_background, blocks=blocks)
    parts = {"state": tree, "slow": hanging, "data": Silent()}
    try:
        assert not checkpointer.save_checkpointables(1, parts)
    finally:
        hanging.released.set()
    # The abandoned save ends meanwhile, and leaves no file.
    assert hanging.ended.wait(60)
    assert checkpointer.save_checkpointables(2, {"state": tree, "data": Silent()})
    checkpointer.wait()
    assert files_below(tmp_path) == []
    slot = tmp_path / "ram" / "hosts" / "0"
    assert [p.name[0] for p in slot.iterdir() if p.is_dir()] == ["2"]


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
