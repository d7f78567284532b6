"""Components: their state is taken at once, and written later."""

import asyncio

import pytest
from etils import epath

from elastic_ckpt.checkpoint import component_io


class Counter:
    """A component that counts, and can fail."""

    def __init__(self, count=0, error=None):
        self.count = count
        self.error = error

    async def save(self, directory):
        taken = self.count

        async def write():
            path = await (directory / "sub").await_creation()
            await asyncio.sleep(0)
            if self.error:
                raise self.error
            path.mkdir()
            (path / "count").write_text(str(taken))

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / "sub" / "count").read_text())

        return read()


class Slow(Counter):
    """A component that hangs."""

    save_timeout_secs = 0.1

    async def save(self, directory):
        del directory

        async def write():
            await asyncio.sleep(3600)

        return write()


def test_the_state_is_that_of_the_call_and_not_of_the_writing(tmp_path):
    counter = Counter(3)
    parts = {"state": {"w": 1}, "c": counter}
    trees, components = component_io.split(parts)
    assert (trees, components) == ({"state": {"w": 1}}, {"c": counter})
    write = component_io.begin_save(components, lambda _: epath.Path(tmp_path))
    counter.count = 4
    assert list(tmp_path.iterdir()) == []
    write()
    other = Counter()
    component_io.load(other, tmp_path)
    assert other.count == 3


def test_the_components_that_hang_are_named(tmp_path):
    def made(name):
        (tmp_path / name).mkdir()
        return epath.Path(tmp_path / name)

    parts = {"c": Slow(), "e": Counter(), "d": Slow()}
    write = component_io.begin_save(parts, made)
    with pytest.raises(TimeoutError, match=r"components \['c', 'd'\] were not saved"):
        write()
    # A timeout of a component itself is its own error.
    failing = {"f": Counter(error=TimeoutError("no answer"))}
    with pytest.raises(TimeoutError, match=r"^no answer$"):
        component_io.begin_save(failing, made)()
