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
        ("nonsense://a/b", "data is not read from nonsense://"),
    ],
)
def test_where_data_is_not_read_from_is_named(url, problem):
    with refused(f"{re.escape(url)}: {problem}.*; download the files, or copy them"):
        files.find_files(url)


@pytest.mark.parametrize(
    ("times", "error", "expected", "calls"),
    [
        (0, OSError(5, "bad"), 7, 1),
        (3, OSError(5, "bad"), 7, 4),
        (
            9,
            OSError(5, "bad"),
            r"the place: cannot be read, in 4 tries \(.*bad.*restore",
            4,
        ),
        (1, errors.DataError("cut short"), "cut short", 1),
    ],
)
def test_a_read_that_fails_is_tried_again(times, error, expected, calls):
    tries = []

    def read():
        tries.append(1)
        if len(tries) <= times:
            raise error
        return 7

    if expected == 7:
        assert files.retried(read, "the place") == 7
    else:
        with refused(expected):
            files.retried(read, "the place")
    assert len(tries) == calls
