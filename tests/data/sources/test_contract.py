"""Files of every format fulfil the contract of sources."""

import gzip
import io
import json
import pathlib
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    decoded,
    lines,
    megatron,
    parquet,
    record_format,
    source,
    tfrecord,
    webdataset,
)
from tests import corpora, megatron_files, source_contract
from tests.source_contract import BLOCK, CORRUPT


def tar(members, kind=tarfile.USTAR_FORMAT):
    """An archive of contents, each with its name."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w", format=kind) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return archived.getvalue()


class TestArrayRecord(source_contract.SourceContract):
    def write(self, path, elements):
        return corpora.write_arrayrecord(path, elements)

    def make(self, files, columns=()):
        return arrayrecord.ArrayRecord(
            files=files, columns=columns, record_format=record_format.TF_EXAMPLE
        )

    def as_read(self, element):
        return {**element, "text": element["text"].encode()}

    def forget_open_files(self):
        arrayrecord._opened.cache_clear()


class TestTFRecord(TestArrayRecord):
    may_be_joined = True

    def write(self, path, elements):
        return corpora.write_tfrecord(path, elements)

    def make(self, files, columns=()):
        return tfrecord.TFRecord(files=files, columns=columns)


class TestLengthOfTFRecord(TestTFRecord):
    """The length of a record is spoilt: the rest of its block is lost."""

    def spoil(self, file):
        content, end = pathlib.Path(file).read_bytes(), 0
        for _ in range(CORRUPT):
            end += 16 + struct.unpack_from("<Q", content, end)[0]
        corpora.spoil(file, content[end:])

    def lost_with(self, number):
        return set(range(number, (number // BLOCK + 1) * BLOCK))


class TestJsonLines(source_contract.SourceContract):
    # A file without its last end of line is whole.
    least_cut = 2
    may_be_joined = True

    def write(self, path, elements):
        plain = [{**each, "tokens": each["tokens"].tolist()} for each in elements]
        path.write_text("".join(json.dumps(each) + "\n" for each in plain))
        return str(path)

    def make(self, files, columns=()):
        return lines.JsonLines(files=files, columns=columns)

    def spoil(self, file):
        corpora.spoil_encoding(file, b"text %d " % CORRUPT)


class TestText(source_contract.SourceContract):
    columns = ("text",)
    may_be_joined = True
    spoil = TestJsonLines.spoil

    def write(self, path, elements):
        path.write_text("".join(each["text"] + "\n" for each in elements))
        return str(path)

    def make(self, files, columns=()):
        return lines.Text(files=files, columns=columns)

    def as_read(self, element):
        return {"text": element["text"]}

    def number_of(self, element):
        return int(element["text"].split()[1])

    def test_a_file_cut_short_is_named(self):
        """Any text is whole."""


class TestGzip(TestJsonLines):
    suffix = ".gz"
    damage = False
    least_cut = 1

    def write(self, path, elements):
        super().write(path, elements)
        path.write_bytes(gzip.compress(path.read_bytes(), 0, mtime=0))
        return str(path)

    def test_blocks_are_a_chain(self, dataset):
        assert source.indexes(dataset)[2].chain(2) == range(4)


class TestZstd(TestGzip):
    suffix = ".zst"
    equal_sizes = False

    def write(self, path, elements):
        TestJsonLines.write(self, path, elements)
        content = path.read_bytes()
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
        return str(path)


class OfColumns(source_contract.SourceContract):
    def lost_with(self, number):
        first = number // BLOCK * BLOCK
        return set(range(first, first + BLOCK))

    def test_blocks_are_those_of_the_file(self, dataset):
        sizes = [index.block_records.tolist() for index in source.indexes(dataset)]
        assert [list(filter(None, each)) for each in sizes] == [
            [8, 8, 4],
            [],
            [8, 8, 8, 4],
        ]


class TestParquet(OfColumns):
    def write(self, path, elements):
        return corpora.write_parquet(path, elements, group_rows=BLOCK)

    def make(self, files, columns=()):
        return parquet.Parquet(files=files, columns=columns)

    def place_of(self, number):
        return f"row group {number // BLOCK}:"

    def write_first(self, directory, first):
        # Without checksums, which take more or fewer bytes.
        directory.mkdir(exist_ok=True)
        table = pa.Table.from_pylist(corpora.documents(first, first + 20))
        options = {"compression": "none", "use_dictionary": False}
        pq.write_table(table, directory / "part", row_group_size=BLOCK, **options)
        return str(directory / "part")


class TestLargeRowGroups(TestParquet):
    """A row group is read in parts of a row, and stays open in between."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch):
        monkeypatch.setattr(source, "BLOCK_BYTES", 1)
        monkeypatch.setattr(decoded, "_MAX_OPEN", 2)

    def write(self, path, elements):
        return corpora.write_parquet(path, elements, group_rows=20)

    def place_of(self, number):
        return f"row group {number // 20}:"

    def lost_with(self, number):
        # From the first row of its page on.
        return set(range(number - 1, 20))

    def test_blocks_are_those_of_the_file(self, dataset):
        index = source.indexes(dataset)[2]
        assert index.block_records.tolist() == [1] * 28
        assert [index.chain(block) for block in (7, 20)] == [range(20), range(20, 28)]
        source_contract.read_all(dataset, 7, num_epochs=1)
        assert len(decoded._OPEN) <= 2


class TestArrow(OfColumns):
    spoil = TestJsonLines.spoil
    new, compression = staticmethod(pa.ipc.new_stream), None
    # The mark at the end of a stream may be missing.
    least_cut = 9

    def write(self, path, elements):
        table = pa.Table.from_pylist(elements, corpora._COLUMNS)
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        with self.new(str(path), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=BLOCK)
        return str(path)

    def make(self, files, columns=()):
        return arrow.Arrow(files=files, columns=columns)

    def place_of(self, number):
        del number
        return "record batch at byte [0-9]+:"


class TestLargeRecordBatches(TestArrow):
    """A record batch is read in parts of a row."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch):
        monkeypatch.setattr(source, "BLOCK_BYTES", 1)

    def lost_with(self, number):
        return {number}

    def test_blocks_are_those_of_the_file(self, dataset):
        assert source.indexes(dataset)[2].block_records.tolist() == [1] * 28


class TestArrowFile(TestArrow):
    new = staticmethod(pa.ipc.new_file)
    least_cut = 1


class TestCompressedArrow(TestArrow):
    compression = "zstd"
    damage = equal_sizes = False


class TestMegatron(source_contract.SourceContract):
    suffix = ".bin"
    columns = ("tokens",)
    damage = False

    def write(self, path, elements):
        held = [np.array_split(each["tokens"], 2) for each in elements]
        return megatron_files.write(path.parent, held, np.int64, name=path.stem)

    def make(self, files, columns=()):
        return megatron.Megatron(files=files, columns=columns)

    def as_read(self, element):
        return {"tokens": element["tokens"]}


class TestWebDataset(source_contract.SourceContract):
    # An archive is filled up with zeros.
    least_cut = 9 * 1024

    def write(self, path, elements):
        members = [
            (f"all/{number:04}.{name}", content)
            for number, element in enumerate(elements)
            for name, content in self._fields(element).items()
        ]
        path.write_bytes(tar(members))
        return str(path)

    def make(self, files, columns=()):
        return webdataset.WebDataset(files=files, columns=columns)

    def as_read(self, element):
        number = self.number_of(element)
        number -= 20 if number >= 20 else 0
        return {"__key__": f"all/{number:04}", **self._fields(element)}

    def _fields(self, element):
        return {"text": element["text"].encode(), "tokens": element["tokens"].tobytes()}

    def lost_with(self, number):
        return set(range(number, (number // BLOCK + 1) * BLOCK))

    def spoil(self, file):
        path = pathlib.Path(file)
        content = path.read_bytes()
        at = content.index(b"all/%04d.tokens" % CORRUPT)
        path.write_bytes(content[:at] + b"\xff" * 200 + content[at + 200 :])
