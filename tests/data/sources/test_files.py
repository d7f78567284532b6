import pathlib
import re

import fsspec
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files


@pytest.fixture(params=["", "memory:/"])
def root(request, tmp_path):
    """A directory of files, here or in a store."""
    root = f"{request.param}{tmp_path}"
    for name in ("b2", "b1", "a1", "c/deep/c1"):
        with fsspec.open(f"{root}/{name}", "wt", auto_mkdir=True) as file:
            file.write(name)
    return root


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [("{0}/b*, {0}/a1", ["b1", "b2", "a1"]), ("{0}/**", ["a1", "b1", "b2", "c1"])],
)
def test_patterns_give_sorted_files_in_the_order_of_the_patterns(
    root, patterns, expected
):
    found = files.find_files(patterns.format(root))
    assert [pathlib.Path(file).name for file in found] == expected


@pytest.mark.parametrize("missing", ["c*", "d*", "d1"])
def test_a_pattern_that_matches_no_file_is_named(root, missing):
    match = f"a_key: {root}/{re.escape(missing)} matches no files; check"
    with pytest.raises(errors.DataError, match=match):
        files.find_files(f"{root}/a1,{root}/{missing}", key="a_key")


@pytest.mark.parametrize("others", [(), ("x1",)])
def test_a_file_whose_name_is_a_pattern_is_read_or_refused(root, others):
    for name in ("x[1]", *others):
        with fsspec.open(f"{root}/{name}", "wt") as file:
            file.write(name)
    match = r"brackets in .*x\[1\] match one .* so the file of this name is not read"
    with pytest.raises(errors.ConfigError, match=match) as raised:
        files.find_files(f"{root}/x[1]")
    (found,) = files.find_files(str(raised.value).rpartition("write ")[2])
    assert found.endswith("/x[1]")


def test_a_file_that_two_patterns_match_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a1").write_text("a1")
    match = "grain_train_files: a1 and .* both match .*a1, so"
    for patterns in ("a1,*", "a1, ./a1", f"a1,{tmp_path}/*"):
        with pytest.raises(errors.ConfigError, match=match):
            files.find_files(patterns)
