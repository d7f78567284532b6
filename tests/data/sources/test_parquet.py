import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.data.sources import columns, parquet, source
from elastic_ckpt.data.sources import files as source_files
from tests import corpora
from tests.source_contract import in_order, plain_all, read


def arrays(dtype, *more):
    """Arrays of many lengths, and those of single numbers."""
    found = [np.arange(n, 3 * n, dtype=dtype) for n in (0, 3, 1, 0, 0, 50, 2)]
    return found + [np.array([number], dtype) for number in more]


# Values of every kind of column.
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
    (pa.list_(pa.int32()), arrays(np.int32)),
    (pa.large_list(pa.uint16()), arrays(np.uint16)),
    (pa.list_(pa.float64()), arrays(np.float64)),
    (pa.list_(pa.int64()), arrays(np.int64, 2**16, -1, 2**31, -(2**31) - 1)),
]
# Pages of two values.
SMALL_PAGES = {"use_dictionary": False, "data_page_size": 64, "write_batch_size": 2}
COMPRESSED = {"compression": "zstd", "data_page_version": "2.0"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Row groups are decoded in parts of a few rows."""
    monkeypatch.setattr(source, "BLOCK_BYTES", 20)


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=str)
@pytest.mark.parametrize("options", [SMALL_PAGES, COMPRESSED, {}], ids=str)
def test_a_value_is_what_was_written_and_a_missing_one_changes_no_other(
    tmp_path, kind, values, options
):
    for held in (values, [values[0], None, *values[1:], None]):
        table = pa.table({"a": pa.array(held, kind)})
        pq.write_table(table, tmp_path / "a", **options)
        source_files.forget_all()
        elements = in_order(parquet.Parquet(files=(str(tmp_path / "a"),)))
        expected = [{"a": value, "record": n} for n, value in enumerate(held)]
        assert plain_all(elements) == plain_all(expected)
        types = [type(element["a"]) for element in elements]
        assert types == list(map(type, held))


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
