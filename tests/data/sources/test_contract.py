"""Files of every format fulfil the contract of sources."""

import functools
import gzip
import io
import json
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pytest

import elastic_ckpt as ec
from elastic_ckpt.data.sources import lines
from tests import corpora, megatron_files, source_contract, tfrecord_files
from tests.source_contract import BLOCK, CORRUPT

# Begins what is compressed by zstd.
FRAME = b"\x28\xb5\x2f\xfd"


def tar(members, kind=tarfile.USTAR_FORMAT):
    """An archive of contents, each with its name."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w", format=kind) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return archived.getvalue()


class TestArrayRecord(source_contract.DamageContract):
    reader = staticmethod(
        functools.partial(ec.data.ArrayRecord, record_format="tf_example")
    )
    write = staticmethod(corpora.write_arrayrecord)

    def as_read(self, element):
        return {**element, "text": element["text"].encode()}


class TestChunksOfArrayRecord(TestArrayRecord):
    """A corrupt chunk loses its records and no other."""

    place = "record 1[2-5]:"
    lost = range(12, 16)

    def write(self, path, elements):
        examples = list(map(tfrecord_files.example, elements))
        corpora.write_records(path, examples, options="group_size:4,uncompressed")


class TestTFRecord(TestArrayRecord):
    reader = ec.data.TFRecord
    write = staticmethod(corpora.write_tfrecord)
    chains = (0, 0, 0, 0)
    may_be_joined = True


class TestLengthOfTFRecord(TestTFRecord):
    """The length of a record is spoilt: the rest of its block is lost."""

    lost = range(CORRUPT, 16)

    def spoilt(self, content):
        at = 0
        for _ in range(CORRUPT):
            at += 16 + struct.unpack_from("<Q", content, at)[0]
        return content[:at] + b"\xff" + content[at + 1 :]


class TestLargeRecords(TestTFRecord):
    """Blocks of a record are read in runs."""

    block_bytes = 1
    blocks = (1,) * 28
    chains = tuple(number // 8 for number in range(28))


class TestJsonLines(source_contract.DamageContract):
    reader = ec.data.JsonLines
    chains = (0, 0, 0, 0)
    # A file without its last end of line is whole.
    least_cut = 2
    may_be_joined = True

    def write(self, path, elements):
        plain = [{**each, "tokens": each["tokens"].tolist()} for each in elements]
        path.write_text("".join(json.dumps(each) + "\n" for each in plain))

    def spoilt(self, content):
        return content.replace(b"text 13 ", b"\xffext 13 ")


class TestText(source_contract.DamageContract):
    reader = ec.data.Text
    columns = ("text",)
    chains = (0, 0, 0, 0)
    # Any text is whole.
    least_cut = 0
    may_be_joined = True
    spoilt = TestJsonLines.spoilt

    def write(self, path, elements):
        path.write_text("".join(each["text"] + "\n" for each in elements))

    def number_of(self, element):
        return int(element["text"].split()[1])


class TestGzip(TestJsonLines):
    """The file ends in the middle of a record: the rest of it is lost."""

    suffix = ".gz"
    least_cut = 1
    lost = range(CORRUPT, 20)

    @pytest.fixture(autouse=True)
    def small_reads(self, monkeypatch):
        monkeypatch.setattr(lines, "_BUFFER_BYTES", 8)

    def write(self, path, elements):
        super().write(path, elements)
        path.write_bytes(gzip.compress(path.read_bytes(), 0, mtime=0))

    def spoilt(self, content):
        return content[: content.index(b"text 13 ")]


class TestZstd(TestGzip):
    """The file ends in the middle of its only frame."""

    suffix = ".zst"
    equal_sizes = False
    place = "(record 0|zst):"
    lost = range(20)

    def write(self, path, elements):
        TestJsonLines.write(self, path, elements)
        path.write_bytes(pa.compress(path.read_bytes(), "zstd", asbytes=True))

    def spoilt(self, content):
        return content[:-20]


class TestParquet(source_contract.DamageContract):
    reader = ec.data.Parquet
    write = staticmethod(corpora.write_parquet)
    # Checksums take more or fewer bytes.
    equal_sizes = False
    place = "row group 1:"
    lost = range(8, 16)


class TestLargeRowGroups(TestParquet):
    """A row group is read in parts of a row, and stays open in between."""

    block_bytes = 1
    blocks = (1,) * 28
    chains = (0,) * 20 + (1,) * 8
    place = "row group 0:"
    # From the first row of its page on.
    lost = range(12, 20)

    def write(self, path, elements):
        corpora.write_parquet(path, elements, group_rows=20)


class TestArrow(source_contract.DamageContract):
    reader = ec.data.Arrow
    spoilt = TestJsonLines.spoilt
    new, compression = staticmethod(pa.ipc.new_stream), None
    # The mark at the end of a stream may be missing.
    least_cut = 9
    place = "record batch at byte [0-9]+:"
    lost = range(8, 16)

    def write(self, path, elements):
        table = pa.Table.from_pylist(elements, corpora._COLUMNS)
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        with self.new(str(path), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=BLOCK)


class TestLargeRecordBatches(TestArrow):
    """A record batch is read in parts of a row."""

    block_bytes = 1
    blocks = (1,) * 28
    chains = tuple(range(28))
    lost = (CORRUPT,)


class TestArrowFile(TestArrow):
    new = staticmethod(pa.ipc.new_file)
    least_cut = 1


class TestCompressedArrow(TestArrow):
    compression = "zstd"
    equal_sizes = False

    def spoilt(self, content):
        # The three record batches have as many frames each.
        before, *frames = content.split(FRAME)
        frames[len(frames) // 2] = bytes(len(frames[len(frames) // 2]))
        return FRAME.join([before, *frames])


class TestMegatron(source_contract.SourceContract):
    reader = ec.data.Megatron
    suffix = ".bin"
    columns = ("tokens",)

    def write(self, path, elements):
        held = [np.array_split(each["tokens"], 2) for each in elements]
        megatron_files.write(path.parent, held, np.int64, name=path.stem, gap=8)


class TestWebDataset(source_contract.DamageContract):
    reader = ec.data.WebDataset
    chains = (0, 0, 0, 0)
    # An archive is filled up with zeros.
    least_cut = 9 * 1024
    lost = range(CORRUPT, 16)
    kind, directory = tarfile.USTAR_FORMAT, "all"

    def write(self, path, elements):
        members = [
            (f"{self.directory}/{number:04}.{name}", content)
            for number, element in enumerate(elements)
            for name, content in self._fields(element).items()
        ]
        directory = tarfile.TarInfo("directory.all")
        directory.type = tarfile.DIRTYPE
        path.write_bytes(directory.tobuf() + tar(members, self.kind))

    def as_read(self, element):
        number = self.number_of(element)
        key = f"{self.directory}/{number - 20 * (number >= 20):04}"
        return {"__key__": key, **self._fields(element)}

    def _fields(self, element):
        return {
            "text": element["text"].encode(),
            "tokens": element["tokens"].tobytes(),
            "seg.png": b"" if self.number_of(element) % 3 else b"mask",
        }

    def spoilt(self, content):
        at = content.index(b"/0013.tokens")
        return content[:at] + b"\xff" * 600 + content[at + 600 :]


class TestLongNames(TestWebDataset):
    """Names that need headers of their own."""

    kind, directory = tarfile.GNU_FORMAT, "a" * 150
