import gzip
import os
import pathlib

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import (
    record_format,
    source,
    tfrecord,
)
from tests import source_contract, tfrecord_files

# Two records of TensorBoard's own tests, written by TensorFlow.
TENSORFLOW_RECORDS = {
    b"\t\x00\x00\xc0%\xddu\xd5A\x1a\rbrain.Event:1": (
        b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"',
        b"\xec\xf32\x8d",
    ),
    b"\t\x00\x00\x00'\xe6\xb3\xd5A\x1a\rbrain.Event:2": (
        b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"',
        b"jM\x0b\x15",
    ),
}


def refused(match):
    return pytest.raises(errors.DataError, match=match)


def raw(*files):
    return tfrecord.TFRecord(files=files, record_format=record_format.BYTES)


def texts(elements):
    return [element["text"] for element in elements]


def test_a_file_that_tensorflow_wrote_is_read(tmp_path):
    content = b"".join(
        header + data + footer for data, (header, footer) in TENSORFLOW_RECORDS.items()
    )
    (tmp_path / "a").write_bytes(content)
    dataset = raw(str(tmp_path / "a"))
    elements = source_contract.read_all(dataset, 1, num_epochs=1)
    assert texts(elements) == list(TENSORFLOW_RECORDS)


@pytest.mark.parametrize(("block_bytes", "num_shards"), [(1, 1), (100, 5)])
def test_records_of_any_size_are_read(tmp_path, monkeypatch, block_bytes, num_shards):
    monkeypatch.setattr(source, "BLOCK_BYTES", block_bytes)
    data = [bytes([n]) * (n * n % 257) for n in range(60)]
    tfrecord_files.write(tmp_path / "a", iter(data))
    elements = source_contract.read_all(
        raw(str(tmp_path / "a")), num_shards, num_epochs=1
    )
    elements.sort(key=lambda element: element["record"])
    assert texts(elements) == data


def test_a_compressed_file_is_named_with_the_remedy(tmp_path):
    (tmp_path / "a").write_bytes(gzip.compress(tfrecord_files.framed(b"text")))
    with refused(
        "/a: not a complete tfrecord file .*byte 0; compressed files are not read"
    ):
        source.indexes(raw(str(tmp_path / "a")))


@pytest.fixture
def file(tmp_path):
    tfrecord_files.write(tmp_path / "a", (b"%d" % number for number in range(3000)))
    return str(tmp_path / "a")


@pytest.fixture
def walks(monkeypatch):
    """The files that were walked over, from now on."""
    walked, walk = [], tfrecord.TFRecord._find

    def noted(self, file):
        walked.append(file)
        return walk(self, file)

    monkeypatch.setattr(tfrecord.TFRecord, "_find", noted)
    return walked


def index(file):
    """The index of `file`, as another process would find it."""
    found = raw(file).index(file)
    return found.content, found.block_records.tolist(), found.block_bytes.tolist()


def test_the_index_says_where_blocks_begin(file):
    starts = [sum(16 + len(b"%d" % n) for n in range(k)) for k in range(0, 3000, 256)]
    assert index(file)[1:] == ([256] * 11 + [184], starts)


def test_large_records_are_in_blocks_of_few(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    tfrecord_files.write(tmp_path / "a", map(bytes, (0, 200, 20, 20, 20, 50, 0, 0)))
    assert index(str(tmp_path / "a"))[1] == [2, 3, 3]


@pytest.mark.parametrize("spoilt", [b"{", b'{"version": 1}', None])
def test_a_file_is_walked_over_once_unless_the_kept_index_is_spoilt(
    file, walks, own_cache, monkeypatch, spoilt
):
    first = index(file)
    (kept,) = (own_cache / "elastic_ckpt" / "tfrecord").iterdir()
    monkeypatch.chdir(os.path.dirname(file))
    assert index(file) == index("a") == first
    assert walks == [file]
    good = kept.read_bytes()
    kept.write_bytes(spoilt or good.replace(b"184", b"183"))
    assert index(file) == first
    assert kept.read_bytes() == good
    assert walks == [file] * 2


def test_a_block_that_ends_elsewhere_than_its_index_says_is_refused(file):
    dataset = raw(file)
    source.indexes(dataset)
    # One record takes the place of the first two.
    content = pathlib.Path(file).read_bytes()
    one = tfrecord_files.framed(bytes(18))
    pathlib.Path(file).write_bytes(one + content[len(one) :])
    with refused("/a: block 0 has 255 records: the file has changed during the run"):
        source_contract.read_all(dataset, 1, num_epochs=1)
