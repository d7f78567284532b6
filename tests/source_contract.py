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


def in_order(dataset, num_shards=1, **reading):
    """The elements in the order of the files, of one epoch by default."""
    elements = read_all(dataset, num_shards, **{"num_epochs": 1, **reading})
    return sorted(elements, key=lambda element: element["record"])


def texts(dataset, num_shards=1):
    return [element["text"] for element in in_order(dataset, num_shards)]


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


def assert_resumes_everywhere(make):
    """Resumes from the state before every element, each time in a new iterator.

    Returns:
      The JSON of the state before every element and at the end, and the elements.
    """
    iterator = iter(make())
    states, elements = [json.dumps(iterator.get_state())], []
    for element in iterator:
        elements.append(plain(element))
        states.append(json.dumps(iterator.get_state()))
    for number, saved in enumerate(states):
        resumed = iter(make())
        resumed.set_state(json.loads(saved))
        assert json.loads(json.dumps(resumed.get_state())) == json.loads(saved)
        assert plain_all(resumed) == elements[number:]
    return states, elements


class SourceContract:
    """What holds for files of every format.

    Attributes:
      suffix: of the names of files.
      columns: of the elements.
      damage: whether damage of a record is found, by a checksum or as values that
        cannot be.
      equal_sizes: whether documents of equal sizes make files of equal sizes.
      may_be_joined: whether files that were joined by cat are a file.
      least_cut: how many bytes at the end of a file mean nothing.
    """

    suffix = ""
    columns = ("text", "tokens")
    damage = True
    equal_sizes = True
    may_be_joined = False
    least_cut = 1

    def write(self, path, elements):
        """Writes a file, with blocks of `BLOCK` records."""
        raise NotImplementedError

    def make(self, files, columns=()):
        raise NotImplementedError

    def as_read(self, element):
        """An element as it is read back."""
        return element

    def number_of(self, element):
        return int(element["tokens"][0])

    def place_of(self, number):
        """How an error names the place of a record of the first file."""
        return f"record {number}:"

    def lost_with(self, number):
        """The records that are lost with one."""
        return {number}

    def spoil(self, file):
        """Changes the record `CORRUPT` of a file, so that it is found to be corrupt."""
        corpora.spoil(file, b"text %d " % CORRUPT)

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

    @pytest.fixture
    def damaged(self, dataset, files):
        """The files after their index was made; a record of the first is damaged."""
        if not self.damage:
            pytest.skip("the format shows no damage of a record")
        source.indexes(dataset)
        self.spoil(files[0])
        return dataset

    def write_files(self, directory):
        directory.mkdir(exist_ok=True)
        ends = np.cumsum(RECORDS).tolist()
        return tuple(
            self.write(
                directory / f"part-{n}{self.suffix}",
                corpora.documents(ends[n] - RECORDS[n], ends[n]),
            )
            for n in range(len(RECORDS))
        )

    def write_first(self, directory, first):
        """A file of the same name, size and blocks, whatever the first document."""
        if not self.equal_sizes:
            pytest.skip("the sizes of files differ")
        directory.mkdir(exist_ok=True)
        return self.write(
            directory / f"part{self.suffix}", corpora.documents(first, first + 20)
        )

    def expected(self, record):
        element = self.as_read(corpora.document(record % NUM_RECORDS))
        return plain({**element, "record": record})

    def numbers(self, elements):
        return list(map(self.number_of, elements))

    def refused(self, file, problem):
        pattern = (
            f"{re.escape(os.path.splitext(file)[0])}.*{problem}.*(restore|write|set)"
        )
        return pytest.raises(errors.DataError, match=pattern)

    def refused_damage(self, files):
        return self.refused(files[0], f"{self.place_of(CORRUPT)}.*corrupt")

    def test_one_shard_reads_what_was_written_in_file_order(self, dataset):
        elements = plain_all(read(dataset, 0, 1, num_epochs=2))
        assert elements == [self.expected(record) for record in range(2 * NUM_RECORDS)]

    @pytest.mark.parametrize(("num_shards", "seed"), [(2, None), (3, 7), (40, 7)])
    def test_any_shards_read_every_record_once_an_epoch(
        self, dataset, num_shards, seed
    ):
        elements = in_order(dataset, num_shards, shuffle_seed=seed, num_epochs=2)
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
        self, dataset, num_shards, monkeypatch
    ):
        # Each resume decodes its blocks, as in a new process.
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        states, elements = assert_resumes_everywhere(
            lambda: read(dataset, 1, num_shards, shuffle_seed=7, num_epochs=2)
        )
        assert len(elements) >= 2 * NUM_RECORDS // num_shards - BLOCK
        assert max(map(len, states)) < 50

    def test_tokens_are_taken_as_elements_are(self, dataset):
        if not isinstance(self.expected(0).get("tokens"), tuple):
            pytest.skip("the format has no arrays")
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

    @pytest.mark.parametrize("column", ["text", "no"])
    def test_a_column_without_tokens_is_named(self, dataset, column):
        elements = iter(read(dataset, 0, 1))
        match = (
            "not a list of tokens"
            if column in self.columns
            else f"no column {column!r}"
        )
        for _ in range(2):
            with pytest.raises(errors.DataError, match=match):
                elements.take_tokens(column, 3)
        assert elements.get_state() == {"epoch": 0, "taken": 0}

    def test_columns_are_selected_or_named(self, files):
        if len(self.columns) == 1:
            for element in read(self.make(files, ("name",)), 0, 1, num_epochs=1):
                assert element.keys() == {"name", "record"}
            return
        for element in read(self.make(files, ("text",)), 0, 1, num_epochs=1):
            assert element.keys() == {"text", "record"}
        with self.refused(files[0], r"\['nothing'\].*'text', 'tokens'\]"):
            read_all(self.make(files, ("text", "nothing")), 1, num_epochs=1)

    @pytest.mark.parametrize("place", ["/nowhere", "memory://nowhere"])
    def test_a_missing_file_is_named_at_once(self, files, monkeypatch, place):
        monkeypatch.setattr(data_files.time, "sleep", None)
        missing = f"{place}/part-9{self.suffix}"
        with self.refused(missing, "correct the path"):
            source.indexes(self.make((*files, missing)))

    @pytest.mark.parametrize("kept", [1, 10, 0.49, 0.8, None])
    def test_a_file_cut_short_is_named(self, files, kept):
        path = pathlib.Path(files[2])
        content = path.read_bytes()
        kept = int(kept * len(content)) if isinstance(kept, float) else kept
        path.write_bytes(content[: kept or -self.least_cut])
        with self.refused(files[2], "(cut short|not a complete)"):
            source.indexes(self.make(files))

    def test_files_joined_by_cat_are_read_or_refused(self, files):
        path = pathlib.Path(files[0])
        path.write_bytes(2 * path.read_bytes())
        if self.may_be_joined:
            elements = read_all(self.make(files[:1]), 1, num_epochs=1)
            assert self.numbers(elements) == 2 * list(range(20))
            return
        with self.refused(files[0], "(another file|not a complete)"):
            source.indexes(self.make(files[:1]))

    @pytest.mark.parametrize("content", [b"a\0", b"text \0 and more\n" * 5000])
    def test_a_file_of_something_else_is_named(self, files, content):
        pathlib.Path(files[1]).write_bytes(content)
        with self.refused(files[1], "(another file|not a)"):
            source.indexes(self.make(files))

    def test_files_without_a_record_are_named(self, files):
        with self.refused(files[1], "not one record"):
            source.indexes(self.make(files[1:2]))

    def test_the_identity_is_that_of_files_and_settings(self, files, tmp_path):
        one, other = self.make(files), self.make(self.write_files(tmp_path / "other"))
        indexes = source.indexes(one)
        assert source.identity(one) == source.identity(other)
        assert source.indexes(one) is indexes
        longer = self.write(tmp_path / f"longer{self.suffix}", corpora.documents(0, 21))
        sources = [
            self.make(files),
            self.make(files, self.columns[:1]),
            self.make(files[::-1]),
            self.make(files[:1]),
            self.make((longer, *files[1:])),
        ]
        prints = set(map(source.fingerprint, sources))
        assert len(prints) == len(sources)
        assert all(re.fullmatch("[0-9a-f]{16}", each) for each in prints)

    @pytest.mark.parametrize("is_remote", [False, True])
    def test_a_file_replaced_by_one_of_its_size_is_read_anew(
        self, tmp_path, monkeypatch, is_remote
    ):
        monkeypatch.setattr(data_files, "_LOOK_SECS", 1e-9)

        def written(first):
            file = self.write_first(tmp_path, first)
            return self.upload(file, tmp_path) if is_remote else file

        dataset = self.make((written(200),))
        before = source.identity(dataset)
        written(220)
        now = source.identity(dataset)
        assert now["files"][0][:4] == before["files"][0][:4]
        assert now["files"] != before["files"]
        elements = read_all(dataset, 1, num_epochs=1)
        assert self.numbers(elements) == list(range(220, 240))

    def test_what_is_between_the_spans_of_the_sample_changes_the_identity(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(data_files, "_SAMPLE_SPAN_BYTES", 0)
        files = (
            self.write_first(tmp_path / "a", 201),
            self.write_first(tmp_path / "b", 202),
        )
        one, two = self.make(files), self.make(files[::-1])
        assert source.identity(one) != source.identity(two)
        undigested = [
            source.identity(dataset, digested=False) for dataset in (one, two)
        ]
        assert undigested[0] == undigested[1]

    def test_a_source_survives_cloudpickle(self, dataset):
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        assert copy == dataset
        assert hash(copy) == hash(dataset)

    def upload(self, file, directory):
        """Copies a file, and those that belong to it, to a store; its address."""
        dataset = self.make((file,))
        uri, *_ = (corpora.upload(f, directory.name) for f in dataset._paths(file))
        return uri

    def test_files_of_a_store_are_those_of_a_directory(self, dataset, tmp_path):
        for file in dataset.files:
            self.upload(file, tmp_path)
        pattern = f"memory://{tmp_path.name}/part-*{self.suffix}"
        remote = self.make(data_files.find_files(pattern))
        assert source.identity(remote) == source.identity(dataset)
        reading = {"shuffle_seed": 7, "num_epochs": 2}
        elements = plain_all(read_all(remote, 3, **reading))
        assert elements == plain_all(read_all(dataset, 3, **reading))

    def test_a_file_that_vanishes_is_tried_again_and_named_unless_it_comes_back(
        self, dataset, files, monkeypatch
    ):
        # Blocks that are kept decoded would be read for ever.
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        monkeypatch.setattr(records, "_ELEMENTS", 1)
        moved = files[2] + ".moved"
        pauses = []

        def sleep(secs):
            pauses.append(secs)
            if len(pauses) == 5:
                os.rename(moved, files[2])

        monkeypatch.setattr(data_files, "time", types.SimpleNamespace(sleep=sleep))
        elements = iter(read(dataset, 0, 1, num_epochs=1, skip_corrupt=True))
        delivered = [next(elements)]
        os.rename(files[2], moved)
        self.forget_open_files()
        with self.refused(files[2], "cannot be read, in 4 tries"):
            delivered += iter(elements.__next__, None)
        assert "skipped" not in elements.get_state()
        rest = list(elements)
        assert len(pauses) == 5
        read_before = NUM_RECORDS - len(rest)
        assert self.numbers(rest) == list(range(read_before, NUM_RECORDS))

    def test_what_is_before_a_corrupt_record_is_taken_first(self, damaged, files):
        elements = iter(read(damaged, 0, 1))
        first = min(self.lost_with(CORRUPT))
        assert self.numbers(elements.take(CORRUPT + 5)) == list(range(first))
        for _ in range(2):
            with self.refused_damage(files):
                elements.take(1)
        assert elements.get_state() == {"epoch": 0, "taken": first}
        resumed = iter(read(damaged, 0, 1))
        resumed.set_state({"epoch": 0, "taken": CORRUPT})
        with self.refused_damage(files):
            next(resumed)

    @pytest.mark.parametrize("num_shards", [1, 3, 40])
    def test_corrupt_records_are_named_or_left_out_and_counted(
        self, damaged, files, num_shards
    ):
        with self.refused_damage(files):
            read_all(damaged, num_shards, num_epochs=1)
        lost = self.lost_with(CORRUPT)
        reading = {"shuffle_seed": 7, "num_epochs": 2, "skip_corrupt": True}
        iterators = [
            iter(read(damaged, n, num_shards, **reading)) for n in range(num_shards)
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

    def test_the_state_before_every_element_knows_what_was_left_out(self, damaged):
        states, _ = assert_resumes_everywhere(
            lambda: read(damaged, 0, 1, num_epochs=2, skip_corrupt=True)
        )
        lost = len(self.lost_with(CORRUPT))
        assert json.loads(states[-1])["skipped"] == 2 * lost
