"""What is read of the content of files, and files of which some would be lost."""

import codecs
import datetime
import functools
import gzip
import io
import json
import pathlib
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import columns, files, source
from tests import corpora, source_contract
from tests.data.sources import test_contract
from tests.tfrecord_files import example, framed

FEW, MORE = {"text": ["a", "b"]}, {"text": list(map(str, range(5000)))}
TWICE = pa.table([["a"], ["b"]], names=["text", "text"])
CODED = {"text": pa.array(["a", "b"]).dictionary_encode()}


def tar(*names, **more):
    return test_contract.tar([(name, name.encode()) for name in names], **more)


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


def more_records():
    return array_record(b"a") + array_record(*[b"more"] * 99_999)


def made(make, content, suffix=""):
    path = pathlib.Path(f"data{suffix}")
    path.write_bytes(content() if callable(content) else content)
    return make(files=(str(path),))


def plain(values):
    """Values that `==` compares, types and all."""
    return source_contract.plain(dict(enumerate(values)))


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


TEXT, WHOLE = ec.data.Text, functools.partial(ec.data.Text, whole_files=True)
JSON, WEB = ec.data.JsonLines, ec.data.WebDataset
ARROW, PARQUET, ARRAYS = ec.data.Arrow, ec.data.Parquet, ec.data.ArrayRecord
RECORDS = ec.data.TFRecord
RAW = functools.partial(RECORDS, record_format="bytes")
# The bytes are in the names of tests, so that they must not have the time.
gz, zstd = functools.partial(gzip.compress, mtime=0), pa.Codec("zstd").compress
LONG = "a" * 150 + "/1.text"
MARK, LINES = codecs.BOM_UTF8, [f"line {number} é" for number in range(20)]
# What TensorFlow writes: two records of TensorBoard's own tests, and the example of its
# tutorial "TFRecord and tf.train.Example".
EVENTS = [
    b"\t\x00\x00\xc0%\xddu\xd5A\x1a\rbrain.Event:1",
    b"\t\x00\x00\x00'\xe6\xb3\xd5A\x1a\rbrain.Event:2",
]
EVENT_FILE = (
    b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"%b\xec\xf32\x8d'
    b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"%bjM\x0b\x15'
) % (*EVENTS,)
EXAMPLE = (
    b"\nR\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00"
    b"\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
    b"\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat"
    b"\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
)
FEATURES = {
    "feature0": np.array([0]),
    "feature1": np.array([4]),
    "feature2": b"goat",
    "feature3": np.float32([0.9876]),
}
OTHER_FEATURES = {
    "several": [b"", b"\xff"],
    "integers": np.array([-(2**63), 2**63 - 1]),
    "none": np.array([], np.int64),
    "floats": np.float32([0.1, -2.5]),
}


def polars():
    """A file without the length of its first message, as Polars writes it."""
    content = ipc(FEW, pa.ipc.new_file)
    return content[:8] + content[16:]


@pytest.mark.parametrize(
    ("make", "suffix", "content", "expected"),
    [
        (TEXT, "", "\r\n".join(LINES).encode(), LINES),
        (TEXT, ".gz", gz("\n".join(LINES).encode()), LINES),
        (TEXT, ".zst", zstd("\n\n  \n".join(LINES).encode(), asbytes=True), LINES),
        (TEXT, ".gz", gz(b"a\nb") + gz(b"c"), ["a", "bc"]),
        # Tapes and block devices fill their last block with zeros.
        (TEXT, ".gz", gz(b"a\n") + bytes(9) + gz(b"b") + bytes(999), ["a", "b"]),
        (JSON, ".gz", gz(b'{"text": "a"}\n' * 9) + bytes(99_999), ["a"] * 9),
        (TEXT, "", MARK + b"a\nb\n", ["a", "b"]),
        (TEXT, "", MARK + b"\na", ["a"]),
        (TEXT, ".gz", gz(MARK + b"a\nb\n"), ["a", "b"]),
        (WHOLE, "", MARK + b"a\nb\n", ["a\nb\n"]),
        (WHOLE, ".gz", gz(b"a\n\nb\n"), ["a\n\nb\n"]),
        (JSON, "", MARK + b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        (JSON, "", rb'{"text": "\ud83d\ude00"}', ["\U0001f600"]),
        (JSON, "", rb'{"text": "\\ud800"}', ["\\ud800"]),
        (WEB, "", tar(LONG, kind=tarfile.PAX_FORMAT), [LONG.encode()]),
        (ARROW, "", polars(), ["a", "b"]),
        (RAW, "", EVENT_FILE, EVENTS),
        (RAW, "", framed(b"") + framed(b"a"), [b"", b"a"]),
        (ARRAYS, "", lambda: array_record(b"", b"a"), [b"", b"a"]),
    ],
)
def test_everything_but_blank_lines_is_read(make, suffix, content, expected):
    assert source_contract.texts(made(make, content, suffix)) == expected


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, -2, 2**63 - 1]),
        np.array([0.5, 1.0]),
        *([1, 2.5], [-1, 2**63], [2**63], [True, 1], [], [[1], [2]]),
    ],
)
def test_lists_of_one_kind_of_numbers_are_arrays_and_no_value_is_rounded(value):
    content = json.dumps({"text": value}, default=np.ndarray.tolist).encode()
    assert plain(source_contract.texts(made(JSON, content))) == plain([value])


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
    (
        pa.list_(pa.struct([("a", pa.int64())])),
        [[{"a": 1}, {"a": 2}], [], [{"a": None}]],
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


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=str)
@pytest.mark.parametrize("options", [SMALL_PAGES, COMPRESSED, {}], ids=str)
def test_a_value_is_what_was_written_and_a_missing_one_changes_no_other(
    monkeypatch, kind, values, options
):
    # Row groups are decoded in parts of a few rows.
    monkeypatch.setattr(source, "BLOCK_BYTES", 20)
    for held in (values, [values[0], None, *values[1:], None]):
        content = parquet_file({"text": pa.array(held, kind)}, **options)
        files.forget_all()
        actual = source_contract.texts(made(PARQUET, content))
        assert plain(actual) == plain(held)
        assert list(map(type, actual)) == list(map(type, held))


def test_a_row_group_is_decoded_a_little_at_a_time(monkeypatch):
    sizes, checked = [], columns.checked

    def noted(batch, corrupt):
        sizes.append(batch.num_rows)
        return checked(batch, corrupt)

    monkeypatch.setattr(columns, "checked", noted)
    monkeypatch.setattr(source, "BLOCK_BYTES", 800)
    texts = {"text": [f"text {n} " * 3 for n in range(800)]}
    dataset = made(PARQUET, parquet_file(texts, **SMALL_PAGES))
    elements = iter(source_contract.read(dataset, 0, 1, num_epochs=1))
    next(elements)
    assert len(sizes) == 1
    list(elements)
    assert sum(sizes) == 800
    assert 0 < max(sizes) < 30


@pytest.mark.parametrize(
    ("record", "features"),
    [(EXAMPLE, FEATURES), (example(OTHER_FEATURES), OTHER_FEATURES)],
)
def test_an_example_has_its_features(record, features):
    (element,) = source_contract.in_order(made(RECORDS, framed(record)))
    expected = source_contract.plain({**features, "record": 0})
    assert source_contract.plain(element) == expected


TWICE_NAMED = "repeats a field of its sample .* or belongs to an earlier sample"
LINK = "byte 1024: '9.txt' is a link"
MORE_TAR = "not a complete webdataset file .the archive ends at byte 1024, but more"
NO_ARROW = "not a complete Arrow file"
MORE_ARROW = f"{NO_ARROW} .it does not end after its record batches"
ANOTHER = "another file ends inside.*if it was joined with cat, list the original files"
NO_RECORD = "not a complete tfrecord file .*byte 0; compressed files are not supp"


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
        (TEXT, b"a\0\nb\n", "not a complete text .*contains NUL bytes"),
        (ARROW, ipc(FEW) + ipc(FEW, pa.ipc.new_file), MORE_ARROW),
        (ARROW, ipc(FEW, pa.ipc.new_file) + ipc(FEW), NO_ARROW),
        (ARROW, ipc(FEW) + b"more", MORE_ARROW),
        (ARROW, ipc(CODED), "has a dictionary message at byte .*, or as Parquet"),
        (ARROW, ipc(TWICE), "column 'text' occurs twice"),
        (ARROW, damaged(b"\xff" * 200), NO_ARROW),
        (ARROW, damaged(b"\xff\xff\xff\xff" + b"\x10\0\0\0" * 40), NO_ARROW),
        (PARQUET, 2 * parquet_file(FEW, write_page_index=True), ANOTHER),
        (PARQUET, parquet_file(MORE) + parquet_file(FEW), ANOTHER),
        (PARQUET, parquet_file(TWICE), "column 'text' occurs twice"),
        (ARRAYS, more_records, "not a complete ArrayRecord file"),
        (RECORDS, gz(framed(b"text")), NO_RECORD),
    ],
)
def test_an_index_refuses_what_it_would_not_read(make, content, match):
    dataset = made(make, content)
    with pytest.raises(errors.DataError, match=f"{re.escape(*dataset.files)}.*{match}"):
        source.indexes(dataset)


@pytest.mark.parametrize(
    "content",
    [
        gz(b"a\n") + b"more",
        gz(b"a\n") + bytes(9) + b"more",
        gz(b"a\n")[:-1],
        gz(b"a\n")[:-8] + bytes(8),
        gz(b"a\n")[:10] + b"more",
    ],
)
def test_a_gzip_file_that_is_cut_altered_or_goes_on_is_refused(content):
    with pytest.raises(errors.DataError, match=r"gz is not a complete text file"):
        source.indexes(made(TEXT, content, ".gz"))


@pytest.mark.parametrize(
    ("make", "content", "match"),
    [
        (JSON, b'{"text": 1, "text": 2}', "field 'text' twice"),
        (JSON, b'{"a": [{"b": 1, "b": 1}]}', "field 'b' twice"),
        (JSON, rb'{"text": "\ud800"}', "surrogates not allowed"),
        (JSON, rb'{"a": [{"\uDFFFx": 1}]}', "surrogates not allowed"),
        (JSON, b'{"text": "\xed\xa0\x80"}', "can't decode"),
        (JSON, b"[1, 2]", "record 1: .*corrupt .*not an object"),
        (JSON, b"{", "record 1: .*corrupt .*cannot be read as JSON"),
        (JSON, b"[" * 100_000, "record 1: .*corrupt .*cannot be read as JSON"),
        (RECORDS, framed(example({"a": b""}) * 2), "the feature 'a' occurs twice"),
        (PARQUET, NO_TEXT, "row group 0: .*corrupt .*UTF8"),
        (
            PARQUET,
            parquet_file({"a": [[0], [1, None]]}),
            "row group 0: .*corrupt .*a list of numbers contains a null",
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
