import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import columns, parquet, source
from tests import corpora
from tests.source_contract import read, read_all

# Three values for every kind of column.
KINDS = {
    "int32": (pa.int32(), [1, -2, 3]),
    "float16": (pa.float16(), [np.float16(1), np.float16(-2.5), np.float16(3)]),
    "float32": (pa.float32(), [0.1, -2.5, 3]),
    "uint64": (pa.uint64(), [2**64 - 1, 0, 1]),
    "bool": (pa.bool_(), [True, False, True]),
    "string": (pa.string(), ["a", "", "grün"]),
    "large_string": (pa.large_string(), ["a", "", "grün"]),
    "binary": (pa.binary(), [b"\xff", b"", b"a"]),
    "timestamp": (
        pa.timestamp("us"),
        [datetime.datetime(2026, 1, day) for day in (1, 2, 3)],
    ),
    "strings": (pa.list_(pa.string()), [["a", "b"], [], ["c"]]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
        [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}, {"a": 3, "b": ["y", "z"]}],
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
}
NUMBERS = {
    "int32": np.int32,
    "float16": np.float16,
    "float32": np.float32,
    "uint64": np.uint64,
}


def parts_of(monkeypatch, num_bytes):
    """Has every row group decoded in parts of about so many bytes."""
    monkeypatch.setattr(source, "BLOCK_BYTES", num_bytes)


def refused(match):
    return pytest.raises(errors.DataError, match=match)


def column(kind, values, path):
    """The values of a column, as they are read."""
    table = pa.table({"a": pa.array(values, kind)})
    file = corpora.write_table(path, table, group_rows=len(values))
    return [e["a"] for e in read_all(parquet.Parquet(files=(file,)), 1, num_epochs=1)]


@pytest.mark.parametrize("name", KINDS)
def test_a_value_is_what_was_written_and_a_missing_one_changes_no_other(
    tmp_path, monkeypatch, name
):
    parts_of(monkeypatch, 20)
    kind, values = KINDS[name]
    kinds = [NUMBERS.get(name, type(value)) for value in values]
    assert_read(column(kind, values, tmp_path / "whole"), kinds, values)
    elements = column(kind, [values[0], None, *values[1:], None], tmp_path / "holes")
    assert elements.pop(1) is None
    assert elements.pop() is None
    assert_read(elements, kinds, values)


def assert_read(elements, kinds, values):
    assert list(map(type, elements)) == kinds
    expected = (
        k(v) if k in NUMBERS.values() else v for k, v in zip(kinds, values, strict=True)
    )
    assert elements == list(expected)


@pytest.mark.parametrize(
    ("kind", "list_of"),
    [
        (pa.int32(), pa.list_),
        (pa.uint16(), pa.large_list),
        (pa.float64(), pa.list_),
        (pa.int64(), pa.list_),
    ],
)
def test_lists_of_numbers_are_arrays(tmp_path, monkeypatch, kind, list_of):
    parts_of(monkeypatch, 20)
    values = [list(range(n, 3 * n)) for n in (0, 3, 1, 0, 0, 50, 2)]
    if kind == pa.int64():
        values += [[2**16], [-1], [2**31], [-(2**31) - 1]]
    elements = column(list_of(kind), values, tmp_path / "a")
    for array, expected in zip(elements, values, strict=True):
        wanted = np.array(expected, kind.to_pandas_dtype())
        np.testing.assert_array_equal(array, wanted, strict=True)


@pytest.mark.parametrize(
    ("compression", "version"), [("snappy", "1.0"), ("zstd", "2.0"), ("gzip", "2.0")]
)
def test_files_as_pyarrow_writes_them_are_read(tmp_path, compression, version):
    table = pa.table({"a": range(1000), "text": [f"text {n % 9}" for n in range(1000)]})
    pq.write_table(
        table,
        tmp_path / "a",
        row_group_size=300,
        compression=compression,
        data_page_version=version,
    )
    elements = read_all(parquet.Parquet(files=(str(tmp_path / "a"),)), 3, num_epochs=1)
    elements.sort(key=lambda element: element["record"])
    assert [(int(e["a"]), e["text"]) for e in elements] == [
        (n, f"text {n % 9}") for n in range(1000)
    ]


def test_a_row_group_is_decoded_a_little_at_a_time(tmp_path, monkeypatch):
    sizes, made = [], columns.checked

    def noted(batch, corrupt):
        sizes.append(batch.num_rows)
        return made(batch, corrupt)

    monkeypatch.setattr(columns, "checked", noted)
    parts_of(monkeypatch, 800)
    table = pa.table({"text": [f"text {n} " * 3 for n in range(800)]})
    file = corpora.write_table(tmp_path / "a", table, group_rows=400)
    elements = iter(read(parquet.Parquet(files=(file,)), 0, 1, num_epochs=1))
    next(elements)
    assert len(sizes) == 1
    list(elements)
    assert sum(sizes) == 800
    assert 0 < max(sizes) < 30


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pa.array(["text 0", "text 1"]), "UTF8"),
        (pa.array([[0], [1, None]]), "a list of numbers has a null in it"),
    ],
)
def test_values_that_cannot_be_are_corrupt(tmp_path, column, problem):
    file = tmp_path / "a"
    table = pa.table({"a": column})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    file.write_bytes(file.read_bytes().replace(b"text 1", b"text \xff"))
    dataset = parquet.Parquet(files=(str(file),))
    with refused(f"/a, row group 0: corrupt .*{problem}"):
        read_all(dataset, 1, num_epochs=1)
    assert read_all(dataset, 1, num_epochs=1, skip_corrupt=True) == []
