import pathlib
import re

import fsspec
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files


def refused(match):
    return pytest.raises(errors.DataError, match=match)


@pytest.fixture(params=["", "memory:/"])
def root(request, tmp_path):
    """A directory of three files, here or in a store."""
    root = f"{request.param}{tmp_path}"
    for name in ("b2", "b1", "a1"):
        write(root, name)
    return root


def write(root, name):
    with fsspec.open(f"{root}/{name}", "wt", auto_mkdir=True) as file:
        file.write(name)


def names(actual):
    return [pathlib.Path(file).name for file in actual]


def test_patterns_give_sorted_files_in_the_order_of_the_patterns(root):
    assert names(files.find_files(f"{root}/b*, {root}/a1")) == ["b1", "b2", "a1"]


def test_patterns_match_files_and_not_directories(root):
    write(root, "c/deep/c1")
    assert names(files.find_files(f"{root}/**")) == ["a1", "b1", "b2", "c1"]
    for missing in ("c*", "d*", "d1"):
        with refused(f"a_key: {root}/{re.escape(missing)} matches no file; check the"):
            files.find_files(f"{root}/a1,{root}/{missing}", key="a_key")


def test_a_file_that_two_patterns_match_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a1")
    for patterns in ("a1,*", "a1, ./a1", f"a1,{tmp_path}/*"):
        with pytest.raises(
            errors.ConfigError,
            match=r"grain_train_files: a1 and .* both match .*a1, which",
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
