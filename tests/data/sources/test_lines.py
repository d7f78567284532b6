"""JSON Lines and plain text, as they are and compressed."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import lines, source
from tests import source_contract
from tests.source_contract import read_all

LINES = [f"line {number} é" for number in range(20)]


def compressed(path, content):
    """Writes bytes, compressed as the suffix of the name says."""
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pa.Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(content)
    return str(path)


def texts(dataset, num_shards=1):
    read = read_all(dataset, num_shards, num_epochs=1)
    return [each["text"] for each in read]


@pytest.mark.parametrize(
    ("suffix", "end"), [("", "\r\n"), (".gz", "\n"), (".zst", "\n\n  \n")]
)
def test_each_line_that_is_not_blank_is_a_document(tmp_path, suffix, end):
    content = end.join(LINES).encode()
    file = compressed(tmp_path / f"a.txt{suffix}", content)
    assert texts(lines.Text(files=(file,))) == LINES
    of_column = lines.Text(files=(file,), columns=("content",))
    (element, *_) = read_all(of_column, 1, num_epochs=1)
    assert element == {"content": LINES[0], "record": 0}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_may_be_a_document(tmp_path, suffix):
    files = [
        compressed(tmp_path / f"{number}.txt{suffix}", f"{line}\nand\n".encode())
        for number, line in enumerate(LINES)
    ]
    files.append(compressed(tmp_path / "empty.txt", b""))
    assert len(texts(lines.Text(files=tuple(files)))) == 2 * len(LINES)
    dataset = lines.Text(files=tuple(files), whole_files=True)
    assert texts(dataset) == [f"{line}\nand\n" for line in LINES]
    assert sorted(texts(dataset, 3)) == sorted(texts(dataset))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damage_in_a_compressed_file_loses_its_rest(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(lines, "_BUFFER_BYTES", 4096)
    path = tmp_path / f"a.txt{suffix}"
    compressed(path, b"".join(b"text %d\n" % number for number in range(100_000)))
    dataset = lines.Text(files=(str(path),))
    source.indexes(dataset)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    reading = {"num_epochs": 1, "skip_corrupt": True}
    iterator = iter(source_contract.read(dataset, 0, 1, **reading))
    num_read = sum(1 for _ in iterator)
    assert 0 < num_read < 100_000
    assert iterator.get_state()["skipped"] == 100_000 - num_read
    # What is lost does not depend on where reading began.
    for begin in (1, num_read // 2, num_read - 7, num_read):
        resumed = iter(source_contract.read(dataset, 0, 1, **reading))
        resumed.set_state({"epoch": 0, "taken": begin})
        assert sum(1 for _ in resumed) == num_read - begin


@pytest.mark.parametrize("line", ["[1, 2]", "{", "[" * 100_000])
def test_a_line_that_is_no_object_is_corrupt(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + '\n{"text": "b"}\n')
    dataset = lines.JsonLines(files=(str(path),))
    with pytest.raises(errors.DataError, match="record 1: corrupt"):
        texts(dataset)
    skipping = read_all(dataset, 1, num_epochs=1, skip_corrupt=True)
    assert [each["text"] for each in skipping] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, -2, 2**63 - 1], np.int64),
        ([0.5, 1.0], np.float64),
        ([1, 2.5], None),
        ([-1, 2**63], None),
        ([2**63], None),
        ([True, 1], None),
        ([], None),
        ([[1], [2]], None),
    ],
)
def test_lists_of_one_kind_of_numbers_are_arrays_and_no_value_is_rounded(
    tmp_path, value, dtype
):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a": value}))
    (element,) = read_all(lines.JsonLines(files=(str(path),)), 1, num_epochs=1)
    actual = element["a"]
    assert type(actual) is (np.ndarray if dtype else list)
    assert getattr(actual, "dtype", None) == dtype
    assert list(actual) == value
