"""Indexes and identities of files, and what some formats have beside."""

import sys
import types

import numpy as np
import pyarrow as pa
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import (
    arrayrecord,
    arrow,
    columns,
    decoded,
    source,
    tfrecord,
)
from tests import corpora, source_contract, tfrecord_files
from tests.data.sources import test_contract


def numbers(*blocks):
    return corpora.Numbers(blocks=blocks)


@pytest.mark.parametrize(
    ("failures", "refusal", "num_left"),
    [
        ([ConnectionError("reset by peer")] * 3, None, 0),
        (
            [OSError(5, "bad")] * 5,
            r"^/data/numbers-0: reading failed 4 times \(.*bad.*restore",
            1,
        ),
        ([errors.DataError("cut short")] * 2, "^cut short$", 1),
    ],
)
def test_an_index_that_cannot_be_read_is_tried_again(failures, refusal, num_left):
    left = list(failures)

    class Unreliable(corpora.Numbers):
        def index(self, file):
            if left:
                raise left.pop()
            return super().index(file)

    dataset = Unreliable(blocks=((3,),))
    if refusal is None:
        assert source.num_records(dataset) == 3
    else:
        with pytest.raises(errors.DataError, match=refusal):
            source.num_records(dataset)
    assert len(left) == num_left


@pytest.mark.parametrize("max_named", [1024, 1])
def test_any_other_blocks_have_another_fingerprint(monkeypatch, max_named):
    monkeypatch.setattr(source, "_MAX_NAMED", max_named)
    sources = [
        numbers((3, 4), (5,)),
        numbers((4, 3), (5,)),
        numbers((7,), (5,)),
        numbers((3, 4), (5, 0)),
        numbers((3, 4), (6,)),
        numbers((5,), (3, 4)),
        numbers((3, 4)),
    ]
    assert len(set(map(source.fingerprint, sources))) == len(sources)


def test_the_identity_of_many_files_is_folded(monkeypatch):
    monkeypatch.setattr(source, "_MAX_NAMED", 3)
    (entry,) = source.identity(numbers(*[(1,)] * 5))["files"]
    assert entry[:3] == ["numbers-0 and 4 more", 40, 5]
    assert len(source.identity(numbers(*[(1,)] * 3))["files"]) == 3


@pytest.fixture
def file(tmp_path):
    tfrecord_files.write(tmp_path / "a", (b"%d" % number for number in range(3000)))
    return tmp_path / "a"


def raw(file):
    return tfrecord.TFRecord(files=(str(file),), record_format="bytes")


@pytest.mark.parametrize("spoilt", [b"{", b'{"version": 1}', None])
def test_a_file_is_walked_over_once_unless_the_kept_index_is_spoilt(
    file, own_cache, monkeypatch, spoilt
):
    walked, walk = [], tfrecord.TFRecord._find

    def counted(self, file):
        walked.append(file)
        return walk(self, file)

    def blocks(file):
        """The sizes of the blocks of a file, as another process would find them."""
        return raw(file).index(str(file)).block_records.tolist()

    monkeypatch.setattr(tfrecord.TFRecord, "_find", counted)
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
    match = "/a: block 0 has 255 records, so the file changed during the run"
    with pytest.raises(errors.DataError, match=match):
        source_contract.texts(dataset)


def test_a_dataset_of_hugging_face_is_read_if_it_is_what_its_files_are(tmp_path):
    class Dataset(types.SimpleNamespace):
        """A stand-in of `datasets.Dataset` with what `from_hf` looks at."""

        def __len__(self):
            return self.length

    elements = corpora.documents(0, 20)
    test_contract.TestArrow().write(tmp_path / "a", elements)
    cache_files = [{"filename": str(tmp_path / "a")}]
    whole = {"cache_files": cache_files, "_indices": None, "length": 20}
    read = source_contract.texts(arrow.from_hf(Dataset(**whole), columns=("text",)))
    assert read == [each["text"] for each in elements]
    for dataset, match in (
        (Dataset(**whole | {"_indices": np.arange(20)}), "on disk, in order; save"),
        (Dataset(**whole | {"length": 10}), "its files on disk, in order; save"),
        (Dataset(**whole | {"cache_files": []}), "this Dataset is not .* on disk"),
        ({"train": Dataset(**whole)}, "this dict is not .*; save one split"),
        ([1, 2], "this list is not"),
    ):
        with pytest.raises(errors.ConfigError, match=match):
            arrow.from_hf(dataset)


def test_a_worker_that_pytorch_has_forked_is_refused_before_it_crashes(
    tmp_path, monkeypatch
):
    files = (corpora.write_records(tmp_path / "a", [b"a"] * 3),)
    dataset = arrayrecord.ArrayRecord(files=files)
    loader = types.SimpleNamespace(get_worker_info=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", loader)
    monkeypatch.setattr(arrayrecord, "_LOADED_IN", 0)
    assert len(source_contract.read_all(dataset, 1, num_epochs=1)) == 3
    loader.get_worker_info = lambda: "worker 0 of 2"
    decoded._KEPT.begin()
    with pytest.raises(errors.ConfigError, match="forkserver"):
        source_contract.read_all(dataset, 1, num_epochs=1)


def test_each_error_of_a_lost_block_has_notes_of_its_own():
    block = source.LostBlock(source.CorruptError("spoilt"))
    for shard in range(2):
        with pytest.raises(source.CorruptError, match="spoilt") as raised:
            block.elements([0])
        raised.value.add_note(f"in the pipeline of logical shard {shard}")
        assert len(raised.value.__notes__) == 1


def test_too_little_memory_is_no_damage():
    with pytest.raises(MemoryError), columns.damaged(errors.DataError):
        raise pa.lib.ArrowMemoryError("malloc of size 1073741824 failed")
