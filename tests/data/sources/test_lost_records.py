"""Files from which a reader could lose records, or parts of them, without a word."""

import functools
import gzip
import io
import pathlib
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    lines,
    megatron,
    parquet,
    source,
    tfrecord,
    webdataset,
)
from tests import corpora, megatron_files, source_contract, tfrecord_files

FEW, MORE = {"text": ["a", "b"]}, {"text": list(map(str, range(5000)))}


def tar(*names, link=""):
    """An archive of files, and a link to the first one."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
        if link:
            member = tarfile.TarInfo("9.txt")
            # S: a sparse file.
            member.type, member.linkname = link.encode(), names[0]
            archive.addfile(member)
    return content.getvalue()


def negative():
    """An archive in which the size of a file leads back to its header, endlessly."""
    member = tarfile.TarInfo("1.txt")
    member.size = -tarfile.BLOCKSIZE
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(4 * tarfile.BLOCKSIZE)


def ipc(columns, new=pa.ipc.new_stream):
    table = pa.table(columns) if isinstance(columns, dict) else columns
    content = io.BytesIO()
    with new(content, table.schema) as writer:
        writer.write_table(table)
    return content.getvalue()


def parquet_file(columns, **options):
    table = pa.table(columns) if isinstance(columns, dict) else columns
    content = io.BytesIO()
    pq.write_table(table, content, **options)
    return content.getvalue()


def array_record(*texts):
    path = pathlib.Path("written")
    corpora.write_records(path, list(texts))
    return path.read_bytes()


def example(*names):
    """A tf.Example in which a name may be twice."""
    return b"".join(tfrecord_files.example({name: b"text"}) for name in names)


TWICE = pa.table([["a"], ["b"]], names=["text", "text"])
FILES = pa.ipc.new_file
WEB, ARRAY = webdataset.WebDataset, arrayrecord.ArrayRecord
ARRAY_CUT = "not a complete ArrayRecord file"
EXAMPLES = {"record_format": "tf_example"}


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(make, content, suffix="", **options):
    path = pathlib.Path(f"data{suffix}")
    path.write_bytes(content() if callable(content) else content)
    return make(files=(str(path),), **options)


def texts(dataset):
    elements = source_contract.read_all(dataset, 1, num_epochs=1)
    return [element["text"] for element in elements]


TWICE_NAMED = "has a field that its sample has already .* or the name of a sample"
LINK = "byte 1024: '9.txt' is a link"
MORE_TAR = "not a complete webdataset file .the archive ends at byte 1024, and more"
MORE_ARROW = "not a complete Arrow file .it does not end after its record batches"
ANOTHER = "another file ends in it.*name each file if several were joined by cat"


@pytest.mark.parametrize(
    ("make", "content", "match"),
    [
        (WEB, tar("1.JPG", "1.jpg"), f"byte 1024: '1.jpg' {TWICE_NAMED}"),
        (WEB, tar("1.txt", "1.txt"), f"byte 1024: '1.txt' {TWICE_NAMED}"),
        (WEB, tar("1.txt", "1.__key__"), f"byte 1024: '1.__key__' {TWICE_NAMED}"),
        (WEB, tar("1.txt", "2.txt", "1.jpg"), f"byte 2048: '1.jpg' {TWICE_NAMED}"),
        (WEB, tar("1.txt", link="1"), LINK),
        (WEB, tar("1.txt", link="2"), LINK),
        (WEB, tar("1.txt", link="S"), LINK),
        (WEB, tar("1.txt") + b"more", MORE_TAR),
        (WEB, negative(), "the size of '1.txt' is damaged"),
        (lines.JsonLines, b'text\n{"a": 1}\n', "not a complete jsonl .*its first or"),
        (lines.Text, b"a\0\nb\n", "not a complete text .*it has NUL bytes"),
        (arrow.Arrow, ipc(FEW) + ipc(FEW, FILES), MORE_ARROW),
        (arrow.Arrow, ipc(FEW, FILES) + ipc(FEW), "not a complete Arrow file"),
        (arrow.Arrow, ipc(FEW, FILES) + ipc(FEW, FILES), MORE_ARROW),
        (arrow.Arrow, ipc(FEW) + b"more", MORE_ARROW),
        (arrow.Arrow, ipc(TWICE), "column 'text' is there twice"),
        (parquet.Parquet, 2 * parquet_file(FEW, write_page_index=True), ANOTHER),
        (parquet.Parquet, parquet_file(MORE) + parquet_file(FEW), ANOTHER),
        (parquet.Parquet, parquet_file(TWICE), "column 'text' is there twice"),
        (
            ARRAY,
            lambda: array_record(b"a") + array_record(*[b"more"] * 99_999),
            ARRAY_CUT,
        ),
    ],
)
def test_an_index_refuses_what_it_would_not_read(make, content, match):
    dataset = made(make, content)
    with pytest.raises(errors.DataError, match=f"{re.escape(*dataset.files)}.*{match}"):
        source.indexes(dataset)


@pytest.mark.parametrize(
    ("make", "content", "options", "match"),
    [
        (lines.JsonLines, b'{"text": 1, "text": 2}', {}, "the field 'text' twice"),
        (lines.JsonLines, b'{"a": [{"b": 1, "b": 1}]}', {}, "the field 'b' twice"),
        (lines.JsonLines, rb'{"text": "\ud800"}', {}, "surrogates not allowed"),
        (lines.JsonLines, rb'{"a": [{"\uDFFFx": 1}]}', {}, "surrogates not allowed"),
        (lines.JsonLines, b'{"text": "\xed\xa0\x80"}', {}, "can't decode"),
        (
            tfrecord.TFRecord,
            tfrecord_files.framed(example("a", "b", "a")),
            EXAMPLES,
            "the feature 'a' is there twice",
        ),
        (
            arrayrecord.ArrayRecord,
            lambda: array_record(example("a", "a")),
            EXAMPLES,
            "the feature 'a' is there twice",
        ),
        # The data of the second file is read as that of the first.
        (parquet.Parquet, parquet_file(FEW) + parquet_file(MORE), {}, "row group 0"),
    ],
)
def test_a_record_of_which_a_part_would_be_lost_is_corrupt(
    make, content, options, match
):
    if make is lines.JsonLines:
        content = b"{}\n" + content + b"\n{}"
    dataset = made(make, content, **options)
    with pytest.raises(errors.DataError, match=f"data, .*{match}"):
        source_contract.read_all(dataset, 1, num_epochs=1)


ONE = np.int64(1).tobytes()


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        (".bin", lambda content: content + b"\0"),
        # The last document ends after the first of two sequences.
        (".idx", lambda content: content[:-8] + ONE),
        # The first one begins at the second, or the third one before the second.
        (".idx", lambda content: content[:-32] + ONE + content[-24:]),
        (".idx", lambda content: content[:-16] + ONE + content[-8:]),
    ],
)
def test_tokens_that_no_document_has_are_refused(tmp_path, suffix, change):
    file = megatron_files.write(tmp_path, [[range(3), range(4)], [], []])
    path = pathlib.Path(file).with_suffix(suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(errors.DataError, match=r"data\.bin: its index .*another file"):
        source.indexes(megatron.Megatron(files=(file,)))


MARK = b"\xef\xbb\xbf"
WHOLE = functools.partial(lines.Text, whole_files=True)


@pytest.mark.parametrize(
    ("make", "suffix", "content", "expected"),
    [
        (lines.Text, ".gz", gzip.compress(b"a\nb") + gzip.compress(b"c"), ["a", "bc"]),
        (lines.Text, "", MARK + b"a\nb\n", ["a", "b"]),
        (lines.Text, "", MARK + b"\na", ["a"]),
        (lines.Text, ".gz", gzip.compress(MARK + b"a\nb\n"), ["a", "b"]),
        (WHOLE, "", MARK + b"a\nb\n", ["a\nb\n"]),
        (lines.JsonLines, "", MARK + b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        (lines.JsonLines, "", rb'{"text": "\ud83d\ude00"}', ["\U0001f600"]),
        (lines.JsonLines, "", rb'{"text": "\\ud800"}', ["\\ud800"]),
    ],
)
def test_everything_in_a_file_is_read(make, suffix, content, expected):
    assert texts(made(make, content, suffix)) == expected
