"""Files from which a reader could lose records, or parts of them, without a word."""

import functools
import gzip
import io
import pathlib
import re
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    files,
    lines,
    parquet,
    source,
    tfrecord,
    webdataset,
)
from tests import corpora, source_contract, tfrecord_files
from tests.data.sources import test_contract

FEW, MORE = {"text": ["a", "b"]}, {"text": list(map(str, range(5000)))}
TWICE = pa.table([["a"], ["b"]], names=["text", "text"])


def tar(*names):
    return test_contract.tar([(name, name.encode()) for name in names])


def header(**properties):
    """The header of a file of an archive, and an end."""
    member = tarfile.TarInfo("9.txt")
    for name, value in properties.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(4 * tarfile.BLOCKSIZE)


def link(kind):
    return tar("1.txt")[:1024] + header(type=kind, linkname="1.txt")


def ipc(columns, new=pa.ipc.new_stream, **options):
    table = pa.table(columns) if isinstance(columns, dict) else columns
    content = io.BytesIO()
    with new(content, table.schema) as writer:
        writer.write_table(table, **options)
    return content.getvalue()


def damaged(message):
    """A stream whose second record batch begins with something else."""
    content = ipc(MORE, max_chunksize=2500)
    begin = content.rindex(b"\xff" * 4, 0, -8)
    return content[:begin] + message + content[begin + len(message) :]


def parquet_file(columns, **options):
    return ipc(columns, functools.partial(pq.ParquetWriter, **options))


# It has no checksums.
NO_TEXT = parquet_file(FEW, compression="none", use_dictionary=False)
NO_TEXT = NO_TEXT.replace(b"\1\0\0\0b", b"\1\0\0\0\xff")


def array_record(*texts):
    path = pathlib.Path("written")
    corpora.write_records(path, list(texts))
    return path.read_bytes()


def made(make, content, **options):
    path = pathlib.Path("data")
    path.write_bytes(content() if callable(content) else content)
    return make(files=(str(path),), **options)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


WEB, JSON, ARROW, PARQUET, RECORDS = (
    webdataset.WebDataset,
    lines.JsonLines,
    arrow.Arrow,
    parquet.Parquet,
    tfrecord.TFRecord,
)
TWICE_NAMED = "has a field that its sample has already .* or the name of a sample"
LINK = "byte 1024: '9.txt' is a link"
MORE_TAR = "not a complete webdataset file .the archive ends at byte 1024, and more"
NO_ARROW = "not a complete Arrow file"
MORE_ARROW = f"{NO_ARROW} .it does not end after its record batches"
ANOTHER = "another file ends in it.*name each file if several were joined by cat"
COMPRESSED = "not a complete tfrecord file .*byte 0; compressed files are not read"


@pytest.mark.parametrize(
    ("make", "content", "match"),
    [
        (WEB, tar("1.JPG", "1.jpg"), f"byte 1024: '1.jpg' {TWICE_NAMED}"),
        (WEB, tar("1.txt", "1.__key__"), f"byte 1024: '1.__key__' {TWICE_NAMED}"),
        (WEB, tar("1.txt", "2.txt", "1.jpg"), f"byte 2048: '1.jpg' {TWICE_NAMED}"),
        (WEB, link(tarfile.LNKTYPE), LINK),
        (WEB, link(tarfile.SYMTYPE), LINK),
        (WEB, link(tarfile.GNUTYPE_SPARSE), LINK),
        (WEB, tar("1.txt") + b"more", MORE_TAR),
        # The size leads back to the header, endlessly.
        (WEB, header(size=-tarfile.BLOCKSIZE), "the size of '9.txt' is damaged"),
        (JSON, b'text\n{"a": 1}\n', "not a complete jsonl .*its first or"),
        (lines.Text, b"a\0\nb\n", "not a complete text .*it has NUL bytes"),
        (ARROW, ipc(FEW) + ipc(FEW, pa.ipc.new_file), MORE_ARROW),
        (ARROW, ipc(FEW, pa.ipc.new_file) + ipc(FEW), NO_ARROW),
        (ARROW, ipc(FEW) + b"more", MORE_ARROW),
        (ARROW, ipc(TWICE), "column 'text' is there twice"),
        (ARROW, damaged(b"\xff" * 200), NO_ARROW),
        (ARROW, damaged(b"\xff\xff\xff\xff" + b"\x10\0\0\0" * 40), NO_ARROW),
        (PARQUET, 2 * parquet_file(FEW, write_page_index=True), ANOTHER),
        (PARQUET, parquet_file(MORE) + parquet_file(FEW), ANOTHER),
        (PARQUET, parquet_file(TWICE), "column 'text' is there twice"),
        (
            arrayrecord.ArrayRecord,
            lambda: array_record(b"a") + array_record(*[b"more"] * 99_999),
            "not a complete ArrayRecord file",
        ),
        (RECORDS, gzip.compress(tfrecord_files.framed(b"text"), mtime=0), COMPRESSED),
    ],
)
def test_an_index_refuses_what_it_would_not_read(make, content, match):
    dataset = made(make, content)
    with pytest.raises(errors.DataError, match=f"{re.escape(*dataset.files)}.*{match}"):
        source.indexes(dataset)


@pytest.mark.parametrize(
    ("make", "content", "match"),
    [
        (JSON, b'{"text": 1, "text": 2}', "the field 'text' twice"),
        (JSON, b'{"a": [{"b": 1, "b": 1}]}', "the field 'b' twice"),
        (JSON, rb'{"text": "\ud800"}', "surrogates not allowed"),
        (JSON, rb'{"a": [{"\uDFFFx": 1}]}', "surrogates not allowed"),
        (JSON, b'{"text": "\xed\xa0\x80"}', "can't decode"),
        (JSON, b"[1, 2]", "record 1: corrupt .*not an object"),
        (JSON, b"{", "record 1: corrupt .*cannot be read as JSON"),
        (JSON, b"[" * 100_000, "record 1: corrupt .*cannot be read as JSON"),
        (
            RECORDS,
            tfrecord_files.framed(
                b"".join(tfrecord_files.example({name: b"text"}) for name in "aba")
            ),
            "the feature 'a' is there twice",
        ),
        (PARQUET, NO_TEXT, "row group 0: corrupt .*UTF8"),
        (
            PARQUET,
            parquet_file({"a": [[0], [1, None]]}),
            "row group 0: corrupt .*a list of numbers has a null in it",
        ),
        # The data of the second file is read as that of the first.
        (PARQUET, parquet_file(FEW) + parquet_file(MORE), "row group 0"),
    ],
)
def test_a_record_of_which_a_part_would_be_lost_is_corrupt(make, content, match):
    if make is JSON:
        content = b"{}\n" + content + b"\n{}"
    dataset = made(make, content)
    with pytest.raises(errors.DataError, match=f"data, .*{match}"):
        source_contract.read_all(dataset, 1, num_epochs=1)


@pytest.mark.parametrize(
    ("make", "contents"),
    [
        (WEB, [test_contract.tar([(name, b"text")]) for name in ("1.txt", "1.jpg")]),
        (ARROW, [ipc({name: ["a"]}) for name in ("text", "note")]),
    ],
)
def test_another_name_of_a_field_changes_the_identity(monkeypatch, make, contents):
    monkeypatch.setattr(files, "_SAMPLE_SPAN_BYTES", 0)
    identities = [source.identity(made(make, content)) for content in contents]
    assert identities[0] != identities[1]
