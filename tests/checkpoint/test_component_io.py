"""Components: their state is taken at once, written later, and numbered by file."""

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


def test_the_state_is_that_of_the_call_and_not_of_the_writing(tmp_path):
    counter = Counter(3)
    write = component_io.begin_save({"c": counter}, lambda _: epath.Path(tmp_path))
    counter.count = 4
    assert list(tmp_path.iterdir()) == []
    write()
    other = Counter()
    component_io.load(other, tmp_path)
    assert other.count == 3


def test_the_components_that_hang_are_named(tmp_path):
    class Slow(Counter):
        save_timeout_secs = 0.1

        async def save(self, directory):
            del directory

            async def write():
                await asyncio.sleep(3600)

            return write()

    parts = {"c": Slow(), "e": Counter(), "d": Slow()}
    write = component_io.begin_save(parts, lambda name: _made(tmp_path / name))
    with pytest.raises(
        TimeoutError, match=r"components \['c', 'd'\] were not saved in"
    ):
        write()


def test_a_timeout_of_a_component_itself_is_its_own_error(tmp_path):
    failing = {"c": Counter(error=TimeoutError("no answer"))}
    write = component_io.begin_save(failing, lambda name: _made(tmp_path / name))
    with pytest.raises(TimeoutError, match=r"^no answer$"):
        write()


def test_trees_and_components_are_told_apart():
    counter = Counter()
    assert component_io.split({"state": {"w": 1}, "data": counter}) == (
        {"state": {"w": 1}},
        {"data": counter},
    )


def test_files_are_numbered_alike_whoever_wrote_them():
    listed = [{"data": ["b", "a"]}, {"data": ["c", "a"], "rng": ["x"]}, {}]
    expected = {"data": {"a": 0, "b": 1, "c": 2}, "rng": {"x": 0}}
    assert component_io.numbered(listed) == expected
    assert component_io.numbered(listed[::-1]) == expected


def _made(path):
    path.mkdir()
    return epath.Path(path)
