import re

import numpy as np
import pytest

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data.sources import source
from tests import corpora

TREE = """\
numbers: 3 files, 4 blocks, 12,034 records, fingerprint {}
|-- columns: ['number']
|-- numbers-0: 96,040 bytes, 2 blocks, 12,005 records
|-- numbers-1: 0 bytes, 0 blocks, 0 records
|-- and 1 more"""
FOLDED = [
    ["numbers-0 to numbers-1", 16, 2],
    ["numbers-2 to numbers-3", 16, 2],
    ["numbers-4 to numbers-4", 8, 1],
]


class Named(corpora.Numbers):
    def settings(self):
        return {"format": "numbers", "columns": ["number"], "nothing": ""}


class Unreliable(corpora.Numbers):
    """Cannot be read at first."""

    def index(self, file):
        TRIES.append(file)
        if len(TRIES) <= 2:
            raise ConnectionError("reset by peer")
        return super().index(file)


TRIES = []


def numbers(*blocks):
    return corpora.Numbers(blocks=blocks)


@pytest.mark.parametrize("num_records", [0, 1, 1023, 1024, 1025, 5000])
def test_blocks_hold_every_record_and_only_the_last_is_short(num_records):
    actual = source.blocks(num_records)
    assert actual.sum() == num_records
    assert (actual[:-1] == source.BLOCK_RECORDS).all()
    assert (actual > 0).all()
    assert actual.dtype == np.int64


def test_records_are_counted_over_all_files():
    assert source.num_records(numbers((3, 4), (), (5,))) == 12


def test_files_without_a_record_are_named():
    with pytest.raises(
        errors.DataError, match=r"/numbers-0, /data/numbers-1: not one record; write"
    ):
        source.indexes(numbers((), (0, 0)))


def test_an_index_that_cannot_be_read_is_tried_again():
    TRIES.clear()
    assert source.num_records(Unreliable(blocks=((3,),))) == 3
    assert TRIES == ["/data/numbers-0"] * 3


def test_the_units_are_those_of_the_blocks():
    actual = source.cut(numbers((9,) * 4, (), (3,) * 4), 2)
    assert actual.file.tolist() == [0] * 4 + [2] * 4
    assert actual.record.tolist() == [0, 9, 18, 27, 36, 39, 42, 45]


def test_the_identity_names_files_sizes_records_and_blocks():
    actual = source.identity(numbers((3, 4), (5,)))
    assert actual["format"] == "numbers"
    assert [entry[:3] for entry in actual["files"]] == [
        ["numbers-0", 56, 7],
        ["numbers-1", 40, 5],
    ]
    assert storage.canonical_json(actual)


def test_any_other_blocks_have_another_fingerprint():
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
    dataset = numbers(*[(1,)] * 5)
    actual = source.identity(dataset)["files"]
    assert [entry[:3] for entry in actual] == FOLDED
    assert len(source.identity(numbers(*[(1,)] * 3))["files"]) == 3
    # The fingerprint still depends on each file.
    moved = [(1,), (1,), (1,), (2,), (0,)]
    assert source.fingerprint(numbers(*moved)) != source.fingerprint(dataset)
    assert source.identity(numbers(*moved))["files"][0] == actual[0]
    assert source.identity(numbers((1, 0), *[(1,)] * 4))["files"][0] != actual[0]


def test_a_folded_identity_has_no_more_entries_than_allowed(monkeypatch):
    monkeypatch.setattr(source, "_MAX_NAMED", 3)
    for count in range(1, 20):
        assert len(source.identity(numbers(*[(1,)] * count))["files"]) <= 3


def test_a_tree_shows_format_files_and_fingerprint():
    dataset = Named(blocks=((12_000, 5), (), (28, 1)))
    shown = source.tree(dataset, max_files=2)
    assert shown == TREE.format(source.fingerprint(dataset))
    assert re.search("fingerprint [0-9a-f]{16}\n", shown)
    assert "more" not in source.tree(dataset)


def test_the_error_of_corrupt_records_says_where_how_many_and_the_way_out():
    error = source.corrupt("/data/a, record 3", "its checksum differs", num_records=5)
    assert error.num_records == 5
    assert isinstance(error, errors.DataError)
    assert str(error) == (
        "/data/a, record 3: corrupt (its checksum differs); restore the file from a"
        " copy, or set corrupt_records=skip, which is ReadOptions(skip_corrupt=True),"
        " to skip and count such records"
    )
