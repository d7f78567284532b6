import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.data.sources import columns, parquet, source
from tests import corpora
from tests.source_contract import in_order, read

# Three values for every kind of column.
KINDS = [
    (pa.int32(), list(np.int32([1, -2, 3]))),
    (pa.float16(), list(np.float16([1, -2.5, 3]))),
    (pa.float32(), list(np.float32([0.1, -2.5, 3]))),
    (pa.uint64(), list(np.uint64([2**64 - 1, 0, 1]))),
    (pa.bool_(), [True, False, True]),
    (pa.string(), ["a", "", "grün"]),
    (pa.large_string(), ["a", "", "grün"]),
    (pa.binary(), [b"\xff", b"", b"a"]),
    (pa.timestamp("us"), [datetime.datetime(2026, 1, day) for day in (1, 2, 3)]),
    (pa.list_(pa.string()), [["a", "b"], [], ["c"]]),
    (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
        [{"a": 1, "b": ["x"]}, {"a": 2, "b": []}, {"a": 3, "b": ["y", "z"]}],
    ),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
]
# Pages of two values.
SMALL_PAGES = {"use_dictionary": False, "data_page_size": 64, "write_batch_size": 2}
COMPRESSED = {"compression": "zstd", "data_page_version": "2.0"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Row groups are decoded in parts of a few rows."""
    monkeypatch.setattr(source, "BLOCK_BYTES", 20)


def column(kind, values, path, **options):
    """The values of a column, as they are read."""
    pq.write_table(pa.table({"a": pa.array(values, kind)}), path, **options)
    return [each["a"] for each in in_order(parquet.Parquet(files=(str(path),)))]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=str)
def test_a_value_is_what_was_written_and_a_missing_one_changes_no_other(
    tmp_path, kind, values
):
    with_holes = [values[0], None, *values[1:], None]
    for path, held, options in (
        (tmp_path / "whole", values, SMALL_PAGES),
        (tmp_path / "holes", with_holes, SMALL_PAGES),
        (tmp_path / "defaults", values, {}),
        (tmp_path / "compressed", with_holes, COMPRESSED),
    ):
        elements = column(kind, held, path, **options)
        assert elements == held
        assert list(map(type, elements)) == list(map(type, held))


@pytest.mark.parametrize(
    ("kind", "list_of"),
    [
        (pa.int32(), pa.list_),
        (pa.uint16(), pa.large_list),
        (pa.float64(), pa.list_),
        (pa.int64(), pa.list_),
    ],
)
def test_lists_of_numbers_are_arrays(tmp_path, kind, list_of):
    values = [list(range(n, 3 * n)) for n in (0, 3, 1, 0, 0, 50, 2)]
    if kind == pa.int64():
        values += [[2**16], [-1], [2**31], [-(2**31) - 1]]
    elements = column(list_of(kind), values, tmp_path / "a", **SMALL_PAGES)
    for array, expected in zip(elements, values, strict=True):
        wanted = np.array(expected, kind.to_pandas_dtype())
        np.testing.assert_array_equal(array, wanted, strict=True)


def test_a_row_group_is_decoded_a_little_at_a_time(tmp_path, monkeypatch):
    sizes, made = [], columns.checked

    def noted(batch, corrupt):
        sizes.append(batch.num_rows)
        return made(batch, corrupt)

    monkeypatch.setattr(columns, "checked", noted)
    monkeypatch.setattr(source, "BLOCK_BYTES", 800)
    table = pa.table({"text": [f"text {n} " * 3 for n in range(800)]})
    file = corpora.write_table(tmp_path / "a", table, group_rows=400)
    elements = iter(read(parquet.Parquet(files=(file,)), 0, 1, num_epochs=1))
    next(elements)
    assert len(sizes) == 1
    list(elements)
    assert sum(sizes) == 800
    assert 0 < max(sizes) < 30
