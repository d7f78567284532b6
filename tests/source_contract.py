"""The contract of the files of every format; subclasses write and read one."""

import concurrent.futures
import itertools
import json
import os
import pathlib
import re

import cloudpickle
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import records
from elastic_ckpt.data.sources import arrayrecord, decoded, source
from elastic_ckpt.data.sources import files as data_files
from tests import corpora

BLOCK = 8
# The documents of each file: blocks that are whole and not, and a file without any.
HELD = ((0, 20), (20, 20), (20, 48))
NUM_RECORDS = 48
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


def resumed_everywhere(elements):
    """Resumes from the state before every element, each time in a new iterator.

    Returns:
      The elements, and the state at the end.
    """
    iterator = iter(elements)
    states, expected = [json.dumps(iterator.get_state())], []
    for element in iterator:
        expected.append(plain(element))
        states.append(json.dumps(iterator.get_state()))
    for number, saved in enumerate(states):
        resumed = iter(elements)
        resumed.set_state(json.loads(saved))
        assert json.loads(json.dumps(resumed.get_state())) == json.loads(saved)
        assert plain_all(resumed) == expected[number:]
    return expected, iterator.get_state()


class SourceContract:
    """What holds for files of every format.

    Attributes:
      reader: makes a source of files and columns.
      suffix: of the names of files.
      columns: of the elements.
      block_bytes: the limit of a block.
      blocks: the records of each block of the last file.
      chains: the chain of each of them.
      equal_sizes: whether documents of equal sizes make files of equal sizes.
      may_be_joined: whether files that were joined by cat are a file.
      least_cut: how many bytes at the end of a file mean nothing; 0 if none do.
    """

    suffix = ""
    columns = ("text", "tokens")
    block_bytes = source.BLOCK_BYTES
    blocks = (8, 8, 8, 4)
    chains = (0, 1, 2, 3)
    equal_sizes = True
    may_be_joined = False
    least_cut = 1

    def write(self, path, elements):
        """Writes a file, with blocks of `BLOCK` records."""
        raise NotImplementedError

    def make(self, files, columns=()):
        return self.reader(files=files, columns=columns)

    def as_read(self, element):
        """An element as it is read back."""
        return {name: element[name] for name in self.columns}

    def number_of(self, element):
        return int(element["tokens"][0])

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        monkeypatch.setattr(source, "BLOCK_RECORDS", BLOCK)
        monkeypatch.setattr(source, "BLOCK_BYTES", self.block_bytes)
        monkeypatch.setattr(decoded, "_MAX_OPEN", 2)

    @pytest.fixture
    def files(self, tmp_path):
        return self.write_files(tmp_path)

    @pytest.fixture
    def dataset(self, files):
        return self.make(files)

    def write_files(self, directory):
        directory.mkdir(exist_ok=True)
        paths = [directory / f"part-{n}{self.suffix}" for n in range(3)]
        for path, held in zip(paths, HELD, strict=True):
            self.write(path, corpora.documents(*held))
        return tuple(map(str, paths))

    def expected(self, num_epochs, lost=()):
        return [
            plain({**self.as_read(corpora.document(number)), "record": record})
            for record in range(num_epochs * NUM_RECORDS)
            if (number := record % NUM_RECORDS) not in lost
        ]

    def numbers(self, elements):
        return list(map(self.number_of, elements))

    def refused(self, file, problem):
        pattern = (
            f"{re.escape(os.path.splitext(file)[0])}.*{problem}.*(restore|write|set)"
        )
        return pytest.raises(errors.DataError, match=pattern)

    def upload(self, file, directory):
        """Copies a file, and those that belong to it, to a store; its address."""
        dataset = self.make((file,))
        uri, *_ = (corpora.upload(f, directory.name) for f in dataset._paths(file))
        return uri

    def test_blocks_are_those_of_the_file(self, dataset):
        index = source.indexes(dataset)[2]
        assert tuple(index.block_records.tolist()) == self.blocks
        assert tuple(index.chains.tolist()) == self.chains

    @pytest.mark.parametrize(
        ("num_shards", "seed"), [(1, None), (2, None), (3, 7), (40, 7)]
    )
    def test_any_shards_read_every_record_once_an_epoch(
        self, dataset, num_shards, seed
    ):
        elements = in_order(dataset, num_shards, shuffle_seed=seed, num_epochs=2)
        assert plain_all(elements) == self.expected(2)
        assert len(decoded._OPEN) <= 2

    def test_shards_that_threads_read_at_once_read_the_same(self, dataset):
        def read_shard(shard):
            return plain_all(read(dataset, shard, 8, shuffle_seed=7, num_epochs=2))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            actual = list(pool.map(read_shard, range(8)))
        assert actual == list(map(read_shard, range(8)))

    @pytest.mark.parametrize("num_shards", [2, 11])
    def test_the_state_before_every_element_can_be_resumed_from(
        self, dataset, num_shards, monkeypatch
    ):
        # Each resume decodes its blocks, as in a new process.
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        of_shard = read(dataset, 1, num_shards, shuffle_seed=7, num_epochs=2)
        elements, state = resumed_everywhere(of_shard)
        assert len(elements) >= 2 * NUM_RECORDS // num_shards - BLOCK
        assert len(json.dumps(state)) < 50

    @pytest.mark.parametrize("column", ["tokens", "text", "no"])
    def test_tokens_are_taken_as_elements_are_or_there_are_none(self, dataset, column):
        one, other = (
            iter(read(dataset, 1, 3, shuffle_seed=7, num_epochs=2)) for _ in range(2)
        )
        if not isinstance(self.expected(1)[0].get(column), tuple):
            is_there = column in self.columns
            match = "not a list of tokens" if is_there else f"no column {column!r}"
            match = rf"record \d+: .*{match}"
            for _ in range(2):
                with pytest.raises(errors.DataError, match=match):
                    one.some_tokens(column, 3)
            assert one.get_state() == other.get_state()
            return
        for number in itertools.cycle((1, 1, 5, 2, NUM_RECORDS)):
            tokens = [each.tolist() for each in one.some_tokens(column, number)]
            elements = list(itertools.islice(other, len(tokens)))
            assert tokens == [each[column].tolist() for each in elements]
            assert len(tokens) <= number
            if not tokens:
                break
            assert one.get_state() == other.get_state()
        assert next(other, None) is None

    def test_columns_are_selected_and_what_is_missing_is_named(
        self, files, monkeypatch
    ):
        column = "text" if len(self.columns) > 1 else "name"
        for element in read(self.make(files, (column,)), 0, 1, num_epochs=1):
            assert element.keys() == {column, "record"}
        if len(self.columns) > 1:
            with self.refused(files[0], r"\['nothing'\].*'text', 'tokens'\]"):
                read_all(self.make(files, ("text", "nothing")), 1, num_epochs=1)
        with self.refused(files[1], "no records"):
            source.indexes(self.make(files[1:2]))
        # A missing file is named at once.
        monkeypatch.setattr(data_files.time, "sleep", None)
        for place in ("/nowhere", "memory://nowhere"):
            missing = f"{place}/part-9{self.suffix}"
            with self.refused(missing, "correct the path"):
                source.indexes(self.make((*files, missing)))

    def test_only_whole_files_of_the_format_are_read_joined_ones_if_they_may_be(
        self, files
    ):
        path = pathlib.Path(files[2])
        content = path.read_bytes()
        refused = [b"a\0", b"text \0 and more\n" * 5000]
        if self.least_cut:
            ends = 1, 10, len(content) * 49 // 100, len(content) * 4 // 5
            refused += [content[:end] for end in (*ends, -self.least_cut)]
        if self.may_be_joined:
            path.write_bytes(2 * content)
            elements = read_all(self.make(files[2:]), 1, num_epochs=1)
            assert self.numbers(elements) == 2 * list(range(20, 48))
        else:
            refused.append(2 * content)
        for each in refused:
            path.write_bytes(each)
            data_files.forget_all()
            with self.refused(
                files[2], "(another file|does not match its index|not a complete)"
            ):
                source.indexes(self.make(files))

    def test_the_identity_is_that_of_files_and_settings(self, files, tmp_path):
        one, other = self.make(files), self.make(self.write_files(tmp_path / "other"))
        indexes = source.indexes(one)
        assert source.identity(one) == source.identity(other)
        assert source.indexes(cloudpickle.loads(cloudpickle.dumps(one))) is indexes
        longer = tmp_path / f"longer{self.suffix}"
        self.write(longer, corpora.documents(0, 21))
        sources = [
            self.make(files),
            self.make(files, self.columns[:1]),
            self.make(files[::-1]),
            self.make(files[:1]),
            self.make((str(longer), *files[1:])),
        ]
        prints = set(map(source.fingerprint, sources))
        assert len(prints) == len(sources)
        assert all(re.fullmatch("[0-9a-f]{16}", each) for each in prints)

    @pytest.mark.parametrize("is_remote", [False, True])
    @pytest.mark.parametrize(("later", "span_bytes"), [(221, 4096), (202, 0)])
    def test_a_file_replaced_by_one_of_its_size_is_read_anew(
        self, tmp_path, monkeypatch, is_remote, later, span_bytes
    ):
        # The sample of the content shows it, or else the format.
        monkeypatch.setattr(data_files, "_SAMPLE_SPAN_BYTES", span_bytes)
        monkeypatch.setattr(data_files, "_LOOK_SECS", 1e-9)

        def written(first):
            path = tmp_path / f"part{self.suffix}"
            self.write(path, corpora.documents(first, first + 20))
            return self.upload(str(path), tmp_path) if is_remote else str(path)

        dataset = self.make((written(201),))
        before = source.identity(dataset)
        undigested = source.identity(dataset, digested=False)
        written(later)
        assert source.identity(dataset) != before
        if self.equal_sizes:
            assert source.identity(dataset, digested=False) == undigested
        elements = read_all(dataset, 1, num_epochs=1)
        assert self.numbers(elements) == list(range(later, later + 20))

    def test_files_of_a_store_are_those_of_a_directory(self, dataset, tmp_path):
        for file in dataset.files:
            self.upload(file, tmp_path)
        pattern = f"memory://{tmp_path.name}/part-*{self.suffix}"
        remote = self.make(data_files.find_files(pattern))
        assert source.identity(remote) == source.identity(dataset)
        elements = in_order(remote, 3, shuffle_seed=7, num_epochs=2)
        assert plain_all(elements) == self.expected(2)

    def test_a_file_that_vanishes_is_named_and_read_when_it_comes_back(
        self, dataset, files, monkeypatch
    ):
        # Blocks that are kept decoded would be read for ever.
        monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
        monkeypatch.setattr(records, "_ELEMENTS", 1)
        elements = iter(read(dataset, 0, 1, num_epochs=1, skip_corrupt=True))
        delivered = [next(elements)]
        os.rename(files[2], files[2] + ".moved")
        # An open file would outlive its name.
        arrayrecord._opened.cache_clear()
        with self.refused(files[2], "reading failed 4 times"):
            delivered.extend(elements)
        assert "skipped" not in elements.get_state()
        os.rename(files[2] + ".moved", files[2])
        delivered.extend(elements)
        assert self.numbers(delivered) == list(range(NUM_RECORDS))


class DamageContract(SourceContract):
    """What holds if damage of a record is found: by a checksum, or in its values.

    Attributes:
      place: how an error names the place of the record `CORRUPT` of the first file.
      lost: the records that are lost with it.
    """

    place = f"record {CORRUPT}:"
    lost = (CORRUPT,)

    def spoilt(self, content):
        """The content of a file, changed where it has the record `CORRUPT`."""
        return content.replace(b"text 13 ", b"text 12 ")

    @pytest.fixture
    def damaged(self, dataset, files):
        """The files after their index was made; a record of the first is damaged."""
        source.indexes(dataset)
        path = pathlib.Path(files[0])
        path.write_bytes(self.spoilt(path.read_bytes()))
        return dataset

    def refused_damage(self, files):
        return self.refused(files[0], f"{self.place}.*corrupt")

    def test_what_is_before_a_corrupt_record_is_read(self, damaged, files):
        elements = iter(read(damaged, 0, 1))
        first = self.lost[0]
        read_before = list(itertools.islice(elements, first))
        assert self.numbers(read_before) == list(range(first))
        for _ in range(2):
            with self.refused_damage(files):
                next(elements)
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
        found, skipped = [], 0
        reading = {"shuffle_seed": 7, "num_epochs": 2, "skip_corrupt": True}
        for shard in range(num_shards):
            of_shard = read(damaged, shard, num_shards, **reading)
            elements, state = resumed_everywhere(of_shard)
            found += elements
            skipped += state.get("skipped", 0)
        found.sort(key=lambda element: element["record"])
        assert found == self.expected(2, self.lost)
        assert skipped == 2 * len(self.lost)
