"""The contract of the files of every format; subclasses write and read one."""

import concurrent.futures
import json
import os
import pathlib
import re
import types

import cloudpickle
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import records
from elastic_ckpt.data.sources import decoded, source
from elastic_ckpt.data.sources import files as data_files
from tests import corpora

BLOCK = 8
# Records of each file: blocks that are whole and not, and a file without any.
RECORDS = (20, 0, 28)
NUM_RECORDS = sum(RECORDS)
# In the middle of the second block of the first file.
CORRUPT = 13


def block_of(number):
    """The records of the block of a record of the first file."""
    first = number // BLOCK * BLOCK
    return set(range(first, first + BLOCK))


def read(dataset, shard, num_shards, **reading):
    return records.Records(
        dataset,
        shard=shard,
        num_shards=num_shards,
        read_options=records.ReadOptions(**reading),
    )


def in_turn(iterators):
    """The elements of iterators that take turns until all have ended."""
    elements, waiting = [], list(iterators)
    while waiting:
        for iterator in list(waiting):
            try:
                elements.append(next(iterator))
            except StopIteration:
                waiting.remove(iterator)
    return elements


def read_all(dataset, num_shards, **reading):
    return in_turn(
        iter(read(dataset, shard, num_shards, **reading)) for shard in range(num_shards)
    )


def plain(element):
    """An element as values that `==` compares, types and all."""
    return {
        name: (value.dtype.str, value.tolist())
        if isinstance(value, np.ndarray | np.generic)
        else value
        for name, value in element.items()
    }


def plain_all(elements):
    return [plain(element) for element in elements]


def numbers(elements):
    return [int(element["tokens"][0]) for element in elements]


def states_and_elements(iterator):
    """The JSON of the state before every element and at the end, and the elements."""
    states, elements = [json.dumps(iterator.get_state())], []
    for element in iterator:
        elements.append(plain(element))
        states.append(json.dumps(iterator.get_state()))
    return states, elements


def assert_resumes_everywhere(make):
    """Resumes from the state before every element, each time in a new iterator."""
    states, elements = states_and_elements(iter(make()))
    for number, saved in enumerate(states):
        resumed = iter(make())
        resumed.set_state(json.loads(saved))
        assert json.dumps(resumed.get_state()) == saved
        assert plain_all(resumed) == elements[number:]
    return states, elements


class SourceContract:
    def write(self, path, elements):
        """Writes a file, with blocks of `BLOCK` records."""
        raise NotImplementedError

    def make(self, files, columns=()):
        raise NotImplementedError

    def as_read(self, element):
        """An element as it is read back."""
        return {**element, "text": element["text"].encode()}

    def place_of(self, number):
        """How an error names the place of a record of the first file."""
        return f"record {number}:"

    def lost_with(self, number):
        """The records that are lost with one."""
        return {number}

    def spoil(self, file, marker):
        """Changes a text in a file, so that it is found to be corrupt."""
        corpora.spoil(file, marker)

    def forget_open_files(self):
        """Closes open files that would outlive their names."""

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        monkeypatch.setattr(source, "BLOCK_RECORDS", BLOCK)

    @pytest.fixture
    def files(self, tmp_path):
        return self.write_files(tmp_path)

    @pytest.fixture
    def dataset(self, files):
        return self.make(files)

    def write_files(self, directory):
        ends = np.cumsum(RECORDS).tolist()
        return tuple(
            self.write(
                directory / f"part-{n}",
                corpora.documents(ends[n] - RECORDS[n], ends[n]),
            )
            for n in range(len(RECORDS))
        )

    def expected(self, record):
        element = self.as_read(corpora.document(record % NUM_RECORDS))
        return plain({**element, "record": record})

    def refused(self, file, problem):
        pattern = f"{re.escape(file)}.*{problem}.*(restore|write|set)"
        return pytest.raises(errors.DataError, match=pattern)

    def test_one_shard_reads_what_was_written_in_file_order(self, dataset):
        elements = plain_all(read(dataset, 0, 1, num_epochs=2))
        assert elements == [self.expected(record) for record in range(2 * NUM_RECORDS)]

    @pytest.mark.parametrize("num_shards", [2, 3, 40])
    @pytest.mark.parametrize("seed", [None, 7])
    def test_any_shards_read_every_record_once_an_epoch(
        self, dataset, num_shards, seed
    ):
        elements = read_all(dataset, num_shards, shuffle_seed=seed, num_epochs=2)
        elements.sort(key=lambda element: element["record"])
        expected = [self.expected(record) for record in range(2 * NUM_RECORDS)]
        assert plain_all(elements) == expected

    def test_shards_that_threads_read_at_once_read_the_same(self, dataset):
        def read_shard(shard):
            return plain_all(read(dataset, shard, 8, shuffle_seed=7, num_epochs=2))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read_shard, range(8))) == [
                read_shard(shard) for shard in range(8)
            ]

    @pytest.mark.parametrize("num_shards", [2, 11])
    def test_the_state_before_every_element_can_be_resumed_from(
        self, dataset, num_shards
    ):
        states, elements = assert_resumes_everywhere(
            lambda: read(dataset, 1, num_shards, shuffle_seed=7, num_epochs=2)
        )
        assert len(elements) >= 2 * NUM_RECORDS // num_shards - BLOCK
        assert max(map(len, states)) < 50

    def test_tokens_are_taken_as_elements_are(self, dataset):
        one, other = (
            iter(read(dataset, 1, 3, shuffle_seed=7, num_epochs=2)) for _ in range(2)
        )
        next(one)
        next(other)
        for number in (1, 5, 2, NUM_RECORDS, 1):
            tokens = one.take_tokens("tokens", number)
            elements = other.take(number)
            assert [t.tolist() for t in tokens] == [
                e["tokens"].tolist() for e in elements
            ]
            assert {t.dtype for t in tokens} <= {np.dtype("i4"), np.dtype("u2")}
            assert one.get_state() == other.get_state()
        assert not tokens

    @pytest.mark.parametrize(
        ("column", "match"),
        [("text", "not a list of tokens"), ("no", r"no column 'no'")],
    )
    def test_a_column_without_tokens_is_named(self, dataset, column, match):
        elements = iter(read(dataset, 0, 1))
        for _ in range(2):
            with pytest.raises(errors.DataError, match=match):
                elements.take_tokens(column, 3)
        assert elements.get_state() == {"epoch": 0, "taken": 0}

    def test_what_is_before_a_corrupt_record_is_taken_first(self, dataset, files):
        source.indexes(dataset)
        self.spoil(files[0], b"text %d " % CORRUPT)
        elements = iter(read(dataset, 0, 1))
        first = min(self.lost_with(CORRUPT))
        assert numbers(elements.take(CORRUPT + 5)) == list(range(first))
        for _ in range(2):
            with self.refused(files[0], f"{self.place_of(CORRUPT)}.*corrupt"):
                elements.take(1)
        assert elements.get_state() == {"epoch": 0, "taken": first}

    def test_columns_that_are_not_named_are_not_read(self, files):
        for element in read(self.make(files, ("text",)), 0, 1, num_epochs=1):
            assert element.keys() == {"text", "record"}

    def test_a_missing_column_is_named_with_those_that_exist(self, files):
        with self.refused(files[0], r"\['nothing'\].*\['text', 'tokens'\]"):
            read_all(self.make(files, ("text", "nothing")), 1, num_epochs=1)

    @pytest.mark.parametrize("place", ["/nowhere", "memory://nowhere"])
    def test_a_missing_file_is_named_at_once(self, files, monkeypatch, place):
        monkeypatch.setattr(data_files.time, "sleep", None)
        with self.refused(f"{place}/part-9", "correct the path"):
            source.indexes(self.make((*files, f"{place}/part-9")))

    @pytest.mark.parametrize("kept", [1, 10, 0.49, 0.99, -1])
    def test_a_file_cut_short_is_named(self, files, kept):
        path = pathlib.Path(files[2])
        content = path.read_bytes()
        kept = int(kept * len(content)) if isinstance(kept, float) else kept
        path.write_bytes(content[:kept])
        with self.refused(files[2], ""):
            source.indexes(self.make(files))

    @pytest.mark.parametrize("content", [b"a", b"text and more of it\n" * 5000])
    def test_a_file_of_something_else_is_named(self, files, content):
        pathlib.Path(files[1]).write_bytes(content)
        with self.refused(files[1], "not a"):
            source.indexes(self.make(files))

    def test_files_without_a_record_are_named(self, files):
        with self.refused(files[1], "not one record"):
            source.indexes(self.make(files[1:2]))

    def test_the_identity_is_the_same_in_every_directory(self, dataset, tmp_path):
        (tmp_path / "other").mkdir()
        other = self.make(self.write_files(tmp_path / "other"))
        assert source.identity(other) == source.identity(dataset)
        assert source.fingerprint(other) == source.fingerprint(dataset)
        assert re.fullmatch("[0-9a-f]{16}", source.fingerprint(dataset))

    def test_other_files_or_columns_or_order_have_another_identity(self, files):
        longer = self.write(
            pathlib.Path(files[0]).parent / "longer", corpora.documents(0, 21)
        )
        sources = [
            self.make(files),
            self.make(files, ("text",)),
            self.make(files[::-1]),
            self.make(files[:1]),
            self.make((longer, *files[1:])),
        ]
        assert len(set(map(source.fingerprint, sources))) == len(sources)

    def write_first(self, directory, first):
        """A file of the same name, size and blocks, whatever the first document."""
        return self.write(directory / "part", corpora.documents(first, first + 20))

    def test_a_file_replaced_by_one_of_its_size_is_read_anew(self, tmp_path):
        dataset = self.make((self.write_first(tmp_path, 200),))
        before = source.identity(dataset)
        self.write_first(tmp_path, 240)
        now = source.identity(dataset)
        assert now["files"][0][:4] == before["files"][0][:4]
        assert now["files"] != before["files"]
        elements = read_all(dataset, 1, num_epochs=1)
        assert numbers(elements) == list(range(240, 260))

    def test_files_of_one_name_that_change_places_have_another_identity(self, tmp_path):
        for place, first in (("a", 200), ("b", 240)):
            (tmp_path / place).mkdir()
            self.write_first(tmp_path / place, first)
        files = tuple(str(tmp_path / place / "part") for place in "ab")
        one, two = self.make(files), self.make(files[::-1])
        assert source.identity(one) != source.identity(two)
        unsampled = [source.identity(dataset, digested=False) for dataset in (one, two)]
        assert unsampled[0] == unsampled[1]

    def test_an_object_replaced_by_one_of_its_size_has_another_identity(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(data_files, "_LOOK_SECS", 1e-9)
        uri = corpora.upload(self.write_first(tmp_path, 200), tmp_path.name)
        before = source.identity(self.make((uri,)))
        corpora.upload(self.write_first(tmp_path, 240), tmp_path.name)
        now = source.identity(self.make((uri,)))
        assert now["files"][0][:4] == before["files"][0][:4]
        assert now["files"] != before["files"]
        elements = read_all(self.make((uri,)), 1, num_epochs=1)
        assert numbers(elements) == list(range(240, 260))

    def test_a_source_survives_cloudpickle(self, dataset):
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        assert copy == dataset
        assert hash(copy) == hash(dataset)

    def test_files_of_a_store_are_those_of_a_directory(self, dataset, tmp_path):
        uris = tuple(corpora.upload(file, tmp_path.name) for file in dataset.files)
        remote = self.make(data_files.find_files(f"memory://{tmp_path.name}/part-*"))
        assert [pathlib.Path(file).name for file in remote.files] == [
            pathlib.Path(uri).name for uri in uris
        ]
        assert source.identity(remote) == source.identity(dataset)
        elements = read_all(remote, 3, shuffle_seed=7, num_epochs=2)
        assert plain_all(elements) == plain_all(
            read_all(dataset, 3, shuffle_seed=7, num_epochs=2)
        )

    def test_a_file_that_vanishes_is_tried_again_and_named(
        self, dataset, files, monkeypatch
    ):
        # Blocks that are kept decoded would be read for ever.
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        elements = iter(read(dataset, 0, 1, skip_corrupt=True))
        next(elements)
        os.unlink(files[2])
        self.forget_open_files()
        with self.refused(files[2], "cannot be read, in 4 tries"):
            list(elements)
        assert "skipped" not in elements.get_state()

    def test_a_file_that_comes_back_is_read_on(self, dataset, files, monkeypatch):
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        monkeypatch.setattr(records, "_ELEMENTS", 1)
        elements = iter(read(dataset, 0, 1, num_epochs=1))
        delivered = [next(elements)]
        moved = files[2] + ".moved"
        os.rename(files[2], moved)
        self.forget_open_files()
        pauses = []

        def sleep(secs):
            pauses.append(secs)
            if len(pauses) == 2:
                os.rename(moved, files[2])

        monkeypatch.setattr(data_files, "time", types.SimpleNamespace(sleep=sleep))
        delivered += elements
        assert len(pauses) == 2
        assert numbers(delivered) == list(range(NUM_RECORDS))

    @pytest.mark.parametrize("num_shards", [1, 3, 40])
    def test_a_corrupt_record_is_named(self, dataset, files, num_shards):
        source.indexes(dataset)
        self.spoil(files[0], b"text %d " % CORRUPT)
        with self.refused(files[0], f"{self.place_of(CORRUPT)}.*corrupt"):
            read_all(dataset, num_shards, num_epochs=1)

    def test_a_corrupt_record_is_named_after_a_resume(self, dataset, files):
        source.indexes(dataset)
        self.spoil(files[0], b"text %d " % CORRUPT)
        elements = iter(read(dataset, 0, 1))
        elements.set_state({"epoch": 0, "taken": CORRUPT})
        with self.refused(files[0], f"{self.place_of(CORRUPT)}.*corrupt"):
            next(elements)

    @pytest.mark.parametrize("num_shards", [1, 3, 40])
    def test_corrupt_records_are_left_out_and_counted(self, dataset, files, num_shards):
        source.indexes(dataset)
        self.spoil(files[0], b"text %d " % CORRUPT)
        lost = self.lost_with(CORRUPT)
        reading = {"shuffle_seed": 7, "num_epochs": 2, "skip_corrupt": True}
        iterators = [
            iter(read(dataset, n, num_shards, **reading)) for n in range(num_shards)
        ]
        elements = in_turn(iterators)
        assert sorted(element["record"] for element in elements) == [
            record
            for record in range(2 * NUM_RECORDS)
            if record % NUM_RECORDS not in lost
        ]
        assert all(plain(e) == self.expected(e["record"]) for e in elements)
        skipped = [i.get_state().get("skipped", 0) for i in iterators]
        assert sum(skipped) == 2 * len(lost)

    def test_the_state_before_every_element_knows_what_was_left_out(
        self, dataset, files
    ):
        source.indexes(dataset)
        self.spoil(files[0], b"text %d " % CORRUPT)
        states, _ = assert_resumes_everywhere(
            lambda: read(dataset, 0, 1, num_epochs=2, skip_corrupt=True)
        )
        lost = len(self.lost_with(CORRUPT))
        assert json.loads(states[-1])["skipped"] == 2 * lost
