"""Arrow files: the contract of every source, and Hugging Face's datasets on disk."""

import pathlib
import types

import numpy as np
import pyarrow as pa
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrow, source
from tests import corpora, source_contract


def written(path, elements, *, as_file=False, compression=None):
    table = pa.Table.from_pylist(
        elements,
        schema=pa.schema([("text", pa.string()), ("tokens", pa.list_(pa.int64()))]),
    )
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=source_contract.BLOCK)
    return str(path)


class TestArrow(source_contract.SourceContract):
    def write(self, path, elements):
        return written(path, elements)

    def make(self, files, columns=()):
        return arrow.Arrow(files=files, columns=columns)

    def as_read(self, element):
        return element

    def spoil(self, file, marker):
        corpora.spoil_encoding(file, marker)

    def place_of(self, number):
        del number
        return "record batch at byte [0-9]+:"

    def lost_with(self, number):
        return source_contract.block_of(number)

    @pytest.mark.parametrize("kept", [1, 10, 0.49, 0.99])
    def test_a_file_cut_short_is_named(self, files, kept):
        super().test_a_file_cut_short_is_named(files, kept)

    def test_blocks_are_the_record_batches(self, dataset):
        block_records = [
            index.block_records.tolist() for index in source.indexes(dataset)
        ]
        assert block_records == [[8, 8, 4], [], [8, 8, 8, 4]]


@pytest.mark.parametrize(
    ("as_file", "compression"), [(True, None), (False, "lz4"), (True, "zstd")]
)
def test_files_with_a_frame_and_compressed_buffers_are_read(
    tmp_path, as_file, compression
):
    documents = corpora.documents(0, 20)
    file = written(
        tmp_path / "a.arrow", documents, as_file=as_file, compression=compression
    )
    dataset = arrow.Arrow(files=(file,), columns=("text",))
    read = source_contract.read_all(dataset, 1, num_epochs=1)
    assert [each["text"] for each in read] == [each["text"] for each in documents]


@pytest.mark.parametrize(
    "content", [b"\xff" * 200, b"\xff\xff\xff\xff" + b"\x10\0\0\0" * 40]
)
def test_a_damaged_message_is_named(tmp_path, content):
    file = written(tmp_path / "a.arrow", corpora.documents(0, 20))
    path = pathlib.Path(file)
    spoilt = bytearray(path.read_bytes())
    second = source.indexes(arrow.Arrow(files=(file,)))[0].block_bytes[1]
    spoilt[second : second + len(content)] = content
    path.write_bytes(bytes(spoilt))
    with pytest.raises(errors.DataError, match=r"a\.arrow: not a complete Arrow file"):
        source.current_indexes(arrow.Arrow(files=(file,)))


def saved(tmp_path, num_documents=20):
    """A stand-in of `datasets.Dataset` with what `from_hf` looks at."""
    file = written(tmp_path / "data-00000-of-00001.arrow", corpora.documents(0, 20))

    class Dataset(types.SimpleNamespace):
        def __len__(self):
            return num_documents

    return Dataset(cache_files=[{"filename": file}], _indices=None)


def test_a_dataset_of_hugging_face_is_read_from_its_files(tmp_path):
    made = arrow.from_hf(saved(tmp_path), columns=("text",))
    assert len(source_contract.read_all(made, 2, num_epochs=1)) == 20


def test_a_dataset_that_is_not_what_its_files_are_is_refused(tmp_path):
    reordered = saved(tmp_path)
    reordered._indices = np.arange(20)
    in_memory = saved(tmp_path)
    in_memory.cache_files = []
    for dataset, match in (
        (reordered, "another order; save it"),
        (saved(tmp_path, 10), "a selection of the rows"),
        (in_memory, "in memory only; save it"),
        ({"train": saved(tmp_path)}, r"one of its splits, \['train'\]"),
        ([1, 2], "got a list; give a datasets.Dataset"),
    ):
        with pytest.raises(errors.ConfigError, match=match):
            arrow.from_hf(dataset)
