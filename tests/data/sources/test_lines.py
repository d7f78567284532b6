"""JSON Lines and plain text, as they are and compressed."""

import codecs
import functools
import gzip
import json

import numpy as np
import pyarrow as pa
import pytest

from elastic_ckpt.data.sources import lines
from tests.source_contract import in_order, texts

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
    assert texts(make(files=(str(path),))) == expected


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
    actual = in_order(lines.JsonLines(files=(str(path),)))[0]["a"]
    assert type(actual) is (np.ndarray if dtype else list)
    assert getattr(actual, "dtype", None) == dtype
    assert list(actual) == value
