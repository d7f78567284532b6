import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import record_format, source, tfrecord
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


def raw(file):
    return tfrecord.TFRecord(files=(str(file),), record_format=record_format.BYTES)


def test_a_file_that_tensorflow_wrote_is_read(tmp_path):
    content = b"".join(
        header + data + footer for data, (header, footer) in TENSORFLOW_RECORDS.items()
    )
    (tmp_path / "a").write_bytes(content)
    assert source_contract.texts(raw(tmp_path / "a")) == list(TENSORFLOW_RECORDS)


@pytest.fixture
def file(tmp_path):
    tfrecord_files.write(tmp_path / "a", (b"%d" % number for number in range(3000)))
    return tmp_path / "a"


def blocks(file):
    """The sizes of the blocks of a file, as another process would find them."""
    return raw(file).index(str(file)).block_records.tolist()


def test_large_records_are_in_blocks_of_few(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 100)
    tfrecord_files.write(tmp_path / "a", map(bytes, (0, 200, 20, 20, 20, 50, 0, 0)))
    assert blocks(tmp_path / "a") == [2, 3, 3]


@pytest.mark.parametrize("spoilt", [b"{", b'{"version": 1}', None])
def test_a_file_is_walked_over_once_unless_the_kept_index_is_spoilt(
    file, own_cache, monkeypatch, spoilt
):
    walked, walk = [], tfrecord.TFRecord._find
    monkeypatch.setattr(
        tfrecord.TFRecord,
        "_find",
        lambda self, file: walked.append(1) or walk(self, file),
    )
    first = blocks(file)
    (kept,) = (own_cache / "elastic_ckpt" / "tfrecord").iterdir()
    monkeypatch.chdir(file.parent)
    assert blocks(file) == blocks("a") == first == [256] * 11 + [184]
    assert len(walked) == 1
    good = kept.read_bytes()
    kept.write_bytes(spoilt or good.replace(b"184", b"183"))
    assert blocks(file) == first
    assert kept.read_bytes() == good
    assert len(walked) == 2


def test_a_block_that_ends_elsewhere_than_its_index_says_is_refused(file):
    dataset = raw(file)
    source.indexes(dataset)
    # One record takes the place of the first two.
    content = file.read_bytes()
    one = tfrecord_files.framed(bytes(18))
    file.write_bytes(one + content[len(one) :])
    match = "/a: block 0 has 255 records: the file has changed during the run"
    with pytest.raises(errors.DataError, match=match):
        source_contract.texts(dataset)
