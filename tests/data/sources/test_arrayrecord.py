import pathlib
import sys
import types

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrayrecord, decoded, record_format, source
from tests import corpora, source_contract


def refused(match):
    return pytest.raises(errors.DataError, match=match)


class TestArrayRecord(source_contract.SourceContract):
    def write(self, path, elements):
        return corpora.write_arrayrecord(path, elements)

    def make(self, files, columns=()):
        return arrayrecord.ArrayRecord(
            files=files, columns=columns, record_format=record_format.TF_EXAMPLE
        )

    def forget_open_files(self):
        arrayrecord._reader.cache_clear()


@pytest.mark.parametrize(("block_records", "num_shards"), [(7, 1), (1, 5)])
def test_raw_records_of_any_size_are_read(
    tmp_path, monkeypatch, block_records, num_shards
):
    monkeypatch.setattr(source, "BLOCK_RECORDS", block_records)
    data = [bytes([n]) * (n * n % 257) for n in range(100)]
    file = corpora.write_records(tmp_path / "a", data)
    actual = source_contract.read_all(
        arrayrecord.ArrayRecord(files=(file,)), num_shards, num_epochs=1
    )
    actual.sort(key=lambda element: element["record"])
    assert [element["text"] for element in actual] == data


def test_a_corrupt_chunk_loses_its_records_and_no_other(tmp_path):
    num_shards = 3
    data = [b"text %d " % number for number in range(100)]
    file = corpora.write_records(
        tmp_path / "a", data, options="group_size:10,uncompressed"
    )
    dataset = arrayrecord.ArrayRecord(files=(file,))
    source.indexes(dataset)
    corpora.spoil(file, b"text 33 ")
    with refused(r"/a, record 3\d: corrupt"):
        source_contract.read_all(dataset, num_shards, num_epochs=1)
    actual = source_contract.read_all(
        dataset, num_shards, num_epochs=1, skip_corrupt=True
    )
    assert sorted(element["text"] for element in actual) == sorted(
        data[:30] + data[40:]
    )


@pytest.mark.parametrize("keep", [0, 40_000, 131_071])
def test_a_file_cut_short_is_named_with_the_reason(tmp_path, keep):
    path = pathlib.Path(corpora.write_texts(tmp_path / "a", num_texts=10))
    path.write_bytes(path.read_bytes()[:keep])
    with refused(
        rf"/a: not a readable ArrayRecord file: it is cut short.* {keep:,} bytes.*;"
        " restore it"
    ):
        arrayrecord.ArrayRecordFiles([str(path)])


def test_a_worker_that_pytorch_has_forked_is_refused_before_it_crashes(
    tmp_path, monkeypatch
):
    file = corpora.write_records(tmp_path / "a", [b"a"] * 3)
    one = arrayrecord.ArrayRecord(files=(file,))
    records = arrayrecord.ArrayRecordFiles((file,))
    loader = types.SimpleNamespace(get_worker_info=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", loader)
    monkeypatch.setattr(arrayrecord, "_is_forked", True)
    assert len(source_contract.read_all(one, 1, num_epochs=1)) == 3
    assert records[0] == (0, b"a")
    loader.get_worker_info = lambda: "worker 0 of 2"
    arrayrecord._reader.cache_clear()
    decoded._KEPT.begin()
    for read in (
        lambda: source_contract.read_all(one, 1, num_epochs=1),
        lambda: records[0],
    ):
        with pytest.raises(errors.ConfigError, match="forkserver"):
            read()
