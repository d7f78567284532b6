import datetime
import functools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import columns, decoded, parquet, source
from tests import corpora, source_contract
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
ROWS = 400


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


def test_few_row_groups_stay_open(tmp_path, monkeypatch):
    # A row a part.
    parts_of(monkeypatch, 1)
    monkeypatch.setattr(decoded, "_MAX_OPEN", 2)
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 40), group_rows=8)
    elements = read_all(parquet.Parquet(files=(file,)), 7, num_epochs=1)
    assert sorted(element["record"] for element in elements) == list(range(40))
    assert len(decoded._OPEN) <= 2


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
    ],
)
def test_lists_of_numbers_are_arrays(tmp_path, monkeypatch, kind, list_of):
    parts_of(monkeypatch, 20)
    values = [list(range(n, 3 * n)) for n in (0, 3, 1, 0, 0, 50, 2)]
    elements = column(list_of(kind), values, tmp_path / "a")
    for array, expected in zip(elements, values, strict=True):
        wanted = np.array(expected, kind.to_pandas_dtype())
        np.testing.assert_array_equal(array, wanted, strict=True)


@pytest.mark.parametrize("num_shards", [1, 9])
@pytest.mark.parametrize(("part_bytes", "first_lost"), [(2**19, 50), (100, 70)])
def test_a_list_with_a_null_loses_the_rest_of_its_row_group_wherever_a_run_resumed(
    tmp_path, monkeypatch, num_shards, part_bytes, first_lost
):
    # Row 80 is in the second one of two row groups.
    values = [[n, None if n == 80 else n] for n in range(100)]
    table = pa.table({"tokens": pa.array(values, pa.list_(pa.int64()))})
    file = corpora.write_table(tmp_path / "a", table, group_rows=50)
    parts_of(monkeypatch, part_bytes)
    monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
    dataset, kept = parquet.Parquet(files=(file,)), []
    for shard in range(num_shards):
        make = functools.partial(
            read, dataset, shard, num_shards, num_epochs=1, skip_corrupt=True
        )
        _, elements = source_contract.assert_resumes_everywhere(make)
        kept += elements
    assert all(e["tokens"] == ("<i8", [e["record"]] * 2) for e in kept)
    numbers = sorted(e["record"] for e in kept)
    assert numbers == list(range(len(numbers)))
    assert first_lost <= len(numbers) <= max(50, first_lost + 10)


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


@pytest.fixture
def file(tmp_path):
    """Two row groups, each of many pages."""
    table = pa.table({"text": [f"text {n} " * 3 for n in range(2 * ROWS)]})
    return corpora.write_table(tmp_path / "a", table, group_rows=ROWS)


@pytest.fixture
def dataset(file):
    return parquet.Parquet(files=(file,))


@pytest.fixture
def parts(monkeypatch):
    """The rows of each part that is decoded from now on, at most some 25."""
    sizes, made = [], columns.Columns

    def noted(batch, corrupt):
        sizes.append(batch.num_rows)
        return made(batch, corrupt)

    monkeypatch.setattr(columns, "Columns", noted)
    parts_of(monkeypatch, 800)
    return sizes


@pytest.mark.usefixtures("large_blocks")
def test_a_row_group_is_decoded_a_little_at_a_time(dataset, parts):
    elements = iter(read(dataset, 0, 1, num_epochs=1))
    next(elements)
    assert len(parts) == 1
    assert 0 < parts[0] < 30
    list(elements)
    assert sum(parts) == 2 * ROWS
    assert max(parts) < 30


@pytest.fixture
def bad_page(file):
    """A page in the middle of the second row group is spoilt; the first row in it."""
    content = pathlib.Path(file).read_bytes()
    begin = pq.read_metadata(file).row_group(1).column(0).data_page_offset
    spoilt = ROWS + ROWS // 2
    assert content.index(b"text %d " % spoilt) > begin
    corpora.spoil(file, b"text %d " % spoilt)
    return spoilt - ROWS


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("num_shards", [1, 9])
def test_a_corrupt_page_costs_the_rest_of_its_row_group_and_is_counted(
    dataset, bad_page, num_shards
):
    reading = {"num_epochs": 2, "skip_corrupt": True, "shuffle_seed": 7}
    shards = [iter(read(dataset, n, num_shards, **reading)) for n in range(num_shards)]
    elements = [element["record"] for element in source_contract.in_turn(shards)]
    skipped = sum(shard.get_state().get("skipped", 0) for shard in shards)
    assert len(set(elements)) == len(elements)
    assert len(elements) + skipped == 4 * ROWS
    assert set(range(ROWS)) <= set(elements)
    assert not set(elements) & set(range(ROWS + bad_page, 2 * ROWS))


def test_text_that_is_none_is_corrupt(tmp_path):
    file = tmp_path / "a"
    table = pa.table({"text": ["text 0", "text 1"]})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    spoilt = file.read_bytes().replace(b"text 1", b"text \xff")
    file.write_bytes(spoilt)
    dataset = parquet.Parquet(files=(str(file),))
    with refused("/a, row group 0: corrupt .*UTF8"):
        read_all(dataset, 1, num_epochs=1)
    assert read_all(dataset, 1, num_epochs=1, skip_corrupt=True) == []
