"""JSON Lines and plain text, as they are and compressed."""

import codecs
import functools
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from elastic_ckpt.data.sources import lines, source
from tests import source_contract

LINES = [f"line {number} é" for number in range(20)]
MARK = codecs.BOM_UTF8
# The bytes are in the names of tests, so that they must not have the time.
gz = functools.partial(gzip.compress, mtime=0)
WHOLE = functools.partial(lines.Text, whole_files=True)


def zstd(content):
    return pa.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize(
    ("make", "suffix", "content", "expected"),
    [
        (lines.Text, "", "\r\n".join(LINES).encode(), LINES),
        (lines.Text, ".gz", gz("\n".join(LINES).encode()), LINES),
        (lines.Text, ".zst", zstd("\n\n  \n".join(LINES).encode()), LINES),
        (lines.Text, ".gz", gz(b"a\nb") + gz(b"c"), ["a", "bc"]),
        (lines.Text, "", MARK + b"a\nb\n", ["a", "b"]),
        (lines.Text, "", MARK + b"\na", ["a"]),
        (lines.Text, ".gz", gz(MARK + b"a\nb\n"), ["a", "b"]),
        (WHOLE, "", MARK + b"a\nb\n", ["a\nb\n"]),
        (WHOLE, ".gz", gz(b"a\n\nb\n"), ["a\n\nb\n"]),
        (lines.JsonLines, "", MARK + b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        (lines.JsonLines, "", rb'{"text": "\ud83d\ude00"}', ["\U0001f600"]),
        (lines.JsonLines, "", rb'{"text": "\\ud800"}', ["\\ud800"]),
    ],
)
def test_everything_but_blank_lines_is_read(tmp_path, make, suffix, content, expected):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert source_contract.texts(make(files=(str(path),))) == expected


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gz), (".zst", zstd)])
def test_damage_in_a_compressed_file_loses_its_rest(
    tmp_path, monkeypatch, suffix, compress
):
    monkeypatch.setattr(lines, "_BUFFER_BYTES", 4096)
    path = tmp_path / f"a.txt{suffix}"
    content = b"".join(b"text %d\n" % number for number in range(100_000))
    path.write_bytes(compress(content))
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
    dataset = lines.JsonLines(files=(str(path),))
    (element,) = source_contract.in_order(dataset)
    actual = element["a"]
    assert type(actual) is (np.ndarray if dtype else list)
    assert getattr(actual, "dtype", None) == dtype
    assert list(actual) == value
