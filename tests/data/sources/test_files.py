import pathlib
import re

import fsspec
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import (
    files,
)


def refused(match):
    return pytest.raises(errors.DataError, match=match)


@pytest.fixture
def directory(tmp_path):
    for name in ("b2", "b1", "a1"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.fixture
def uri(tmp_path):
    root = f"memory://{tmp_path.name}"
    for name in ("b2", "b1", "a1"):
        with fsspec.open(f"{root}/{name}", "wt") as file:
            file.write(name)
    return root


@pytest.fixture(params=["directory", "uri"])
def root(request):
    """Three files, here or in a store."""
    return str(request.getfixturevalue(request.param))


def names(actual):
    return [pathlib.Path(file).name for file in actual]


def test_patterns_give_sorted_files_in_the_order_of_the_patterns(root):
    assert names(files.find_files(f"{root}/b*, {root}/a1")) == ["b1", "b2", "a1"]


def test_what_is_found_can_be_opened(root):
    for file in files.find_files(f"{root}/*1"):
        content = names([file])[0].encode()
        assert files.content(file).num_bytes == 2
        with files.opened(file) as stream:
            stream.seek(1)
            assert stream.read() == content[1:]
        assert pathlib.Path(files.local_copy(file)).read_bytes() == content


def test_patterns_match_files_and_not_directories(root):
    with fsspec.open(f"{root}/c/deep/c1", "wt", auto_mkdir=True) as file:
        file.write("c1")
    assert names(files.find_files(f"{root}/**")) == ["a1", "b1", "b2", "c1"]
    with refused(r"c\* matches no file"):
        files.find_files(f"{root}/c*")


@pytest.mark.parametrize("pattern", ["c*", "c1"])
def test_a_pattern_without_a_file_is_named(root, pattern):
    with refused(rf"a_key: {root}/{pattern[0]}.* matches no file; check the path, or"):
        files.find_files(f"{root}/a1,{root}/{pattern}", key="a_key")


def test_a_file_that_two_patterns_match_is_refused(directory, monkeypatch):
    monkeypatch.chdir(directory)
    first = sorted(path.name for path in directory.iterdir() if path.is_file())[0]
    for patterns in (f"{first},*", f"{first}, ./{first}", f"{first},{directory}/*"):
        with pytest.raises(
            errors.ConfigError,
            match=rf"grain_train_files: {first} and .* both match .*{first}, which",
        ):
            files.find_files(patterns)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("hf://datasets/a/b.parquet", "data is not read from hf://"),
        ("https://example.com/a.parquet", "data is not read from https://"),
        ("nonsense://a/b", "there is no client for nonsense://"),
    ],
)
def test_where_data_is_not_read_from_is_named(url, problem):
    with refused(f"{re.escape(url)}: {problem}.*; download the files, or copy them"):
        files.find_files(url)


IO_ERROR = OSError(5, "Input/output error")


class Failing:
    """Fails so many times, then returns 7."""

    def __init__(self, times, error=IO_ERROR):
        self.times = times
        self.error = error
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 7


@pytest.mark.parametrize("times", [0, 3])
def test_a_read_that_fails_is_tried_again(times):
    read = Failing(times)
    assert files.retried(read, "the place") == 7
    assert read.calls == times + 1


def test_a_read_that_always_fails_is_named_with_its_place():
    read = Failing(100)
    with refused(
        r"the place: cannot be read, in 4 tries \(.*Input/output error\); restore"
    ):
        files.retried(read, "the place")
    assert read.calls == 4


@pytest.mark.parametrize("error", [errors.DataError("cut short"), ValueError("bug")])
def test_an_error_that_stays_is_not_tried_again(error):
    read = Failing(1, error)
    with pytest.raises(type(error), match=str(error)):
        files.retried(read, "the place")
    assert read.calls == 1
