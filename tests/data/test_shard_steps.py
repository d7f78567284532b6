"""The identity of a pipeline: its sources, its settings, and S."""

import functools
import pathlib
import re
import shutil
import threading

import grain
import numpy as np
import pytest

from elastic_ckpt import data as ec_data
from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, sharded_data, state
from tests import corpora, pipelines, worlds

NUM_SHARDS = 4


def refused(match, error=errors.ConfigError):
    return pytest.raises(error, match=match)


@pytest.fixture
def files(tmp_path):
    """Parquet files of 40 lists of tokens each."""
    return tuple(
        corpora.write_parquet(
            tmp_path / name, corpora.documents(first, first + 40), group_rows=10
        )
        for name, first in (("a", 100), ("b", 140))
    )


def rows_of(files, shard, *, num_shards=NUM_SHARDS, window=5, seed=0, length=8):
    """Rows of tokens, by nothing but steps of ours."""
    records = ec_data.Records(
        ec_data.Parquet(files=files, columns=("tokens",)),
        shard=shard,
        num_shards=num_shards,
        read_options=ec_data.ReadOptions(shuffle_seed=seed),
    )
    documents = ec_data.lm.Documents(column="tokens", tokenizer=None)
    return ec_data.lm.Rows(
        ec_data.lm.Tokens(records, documents=documents),
        length=length,
        window=window,
        seed=seed,
        shard=shard,
    )


def made(files, **settings):
    return sharded_data.sharded(functools.partial(rows_of, files, **settings))


@pytest.fixture
def saved(files, tmp_path):
    """A state in the middle of a run."""
    world = worlds.World(made(files), 2, NUM_SHARDS)
    for _ in range(3):
        world.next()
    world.write(tmp_path / "state")
    return tmp_path / "state"


def test_a_run_without_a_name_resumes_with_its_settings_and_names_others(files, saved):
    one, resumed = (worlds.World(made(files), n, NUM_SHARDS) for n in (1, 4))
    for _ in range(3):
        one.next()
    resumed.read(saved)
    for _ in range(5):
        assert resumed.next() == one.next()
    for change, message in (
        ({"window": 6}, "(Rows.window: saved 5, now 6)"),
        ({"length": 9}, "(Rows.length: saved 8, now 9)"),
        ({"num_shards": 8}, "(num_logical_shards: saved 4, now 8)"),
        ({"seed": 1}, "(Records.shuffle_seed: saved 0, now 1; Rows.seed: saved 0, now"),
    ):
        with refused(re.escape(message), errors.DataError):
            worlds.World(made(files, **change), 2, NUM_SHARDS).read(saved)


def test_other_files_are_named_and_also_one_that_was_replaced(files, saved):
    def read(*names):
        worlds.World(made(names), 2, NUM_SHARDS).read(saved)

    with refused(r"\(Records.files: a2 is new\)", errors.DataError):
        read(*files, shutil.copy(files[0], f"{files[0]}2"))
    content = pathlib.Path(files[1]).read_bytes()
    corpora.write_parquet(
        pathlib.Path(files[1]), corpora.documents(180, 220), group_rows=10
    )
    with refused(r"\(Records.files: b had .* bytes and 40 records", errors.DataError):
        read(*files)
    # A page that is spoilt is a replacement of the same size.
    pathlib.Path(files[1]).write_bytes(content)
    corpora.spoil(files[1], b"text 150 ")
    with refused("b had .* and 40, with other content", errors.DataError):
        read(*files)


def is_even(row):
    return row["tokens"][0] % 2 == 0


def test_steps_of_others_are_compared_by_their_order_and_need_a_name(files, saved):
    def make_shard(shard):
        return rows_of(files, shard).filter(is_even)

    with refused(
        r"with a saved state, FilterIterDataset\(.*is_even.*; pass pipeline=\"a name"
    ):
        sharded_data.sharded(make_shard)
    data = sharded_data.sharded(make_shard, pipeline="even, version 1")
    with refused(
        r'steps: saved .*"Rows"\], now .*"Rows", "FilterIterDataset"\]',
        errors.DataError,
    ):
        worlds.World(data, 2, NUM_SHARDS).read(saved)
    other = sharded_data.sharded(make_shard, pipeline="even, version 2")
    changes = state.pipeline_changes(data.identity(), other.identity())
    assert changes == ['pipeline: saved "even, version 1", now "even, version 2"']


def test_a_pipeline_that_reads_another_shard_is_refused_when_it_is_made(files):
    def first_for(wrong, shard):
        return rows_of(files, 0 if shard == wrong else shard)

    second = sharded_data.sharded(functools.partial(first_for, 1))
    with refused(r"make_shard\(1\) contains Records\(shard=0 of 4\); pass the arg"):
        next(worlds.World(second, 1, NUM_SHARDS).hosts[0])
    with refused(r"make_shard\(3\) contains Records\(shard=0 of 4\)"):
        sharded_data.sharded(functools.partial(first_for, 3))


def mixed(files, shard, weights, **settings):
    parts = {
        name: rows_of((file,), shard, **settings)
        for name, file in zip(("web", "code"), files, strict=True)
        if name in weights
    }
    return mixing.Mixture(parts, weights, shard=shard)


def test_of_a_mixture_weights_may_change_and_settings_of_its_datasets_may_not(files):
    def identity(weights, **settings):
        make_shard = functools.partial(mixed, files, weights=weights, **settings)
        return sharded_data.sharded(make_shard).identity()

    before = identity({"web": 1, "code": 2})
    for weights in ({"web": 7, "code": 0}, {"web": 1}, {"code": 3}):
        assert state.pipeline_changes(before, identity(weights)) == []
        assert state.pipeline_changes(identity(weights), before) == []
    other = identity({"web": 1}, window=6)
    assert state.pipeline_changes(before, other) == [
        "datasets.web.Rows.window: saved 5, now 6"
    ]


def test_the_steps_that_grain_mixes_are_compared(files):
    def identity(window):
        def make_shard(shard):
            rows = rows_of(files[:1], shard), rows_of(files[1:], shard, window=window)
            return grain.IterDataset.mix(rows, [1, 2])

        return sharded_data.sharded(make_shard, pipeline="mixed").identity()

    (change,) = state.pipeline_changes(identity(5), identity(6))
    assert change.startswith('MixedIterDataset.parents: saved [[{"name": "Records"')


class Lines:
    """A user's source of lines, which it opens itself."""

    def __init__(self, path, first=0):
        self._path, self._first = path, first

    def __len__(self):
        return 60 - self._first

    def __getitem__(self, number):
        return {"x": np.array(self._first + number)}


def is_of(shard, row):
    return row["x"] % NUM_SHARDS == shard


class Locked(Lines):
    """One that cannot be pickled."""

    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()


LISTED = grain.MapDataset.source([{"x": np.array(number)} for number in range(60)])
NAMED = grain.MapDataset.range(60).map(lambda n: {"x": np.array(n)})
# Pipelines of which each shard reads all examples.
WHOLE = {
    "a list": lambda _: LISTED,
    "own source": lambda _: grain.MapDataset.source(Lines("a")),
    "repeated": lambda shard: NAMED.shuffle(seed=shard).repeat(2).map(dict),
    "filtered": lambda _: NAMED.filter(functools.partial(is_of, 1)),
    "mixed with a part": lambda shard: grain.MapDataset.mix(
        [NAMED[shard::NUM_SHARDS], LISTED]
    ),
}
# Those of which each reads its part, or which cannot be compared.
PARTS = {
    "sliced": lambda shard: NAMED.shuffle(seed=1)[shard::NUM_SHARDS],
    "own source": lambda shard: grain.MapDataset.source(Lines("a", shard)),
    "filtered": lambda shard: NAMED.filter(functools.partial(is_of, shard)),
    "filtered in place": lambda shard: NAMED.filter(
        lambda row: row["x"] % NUM_SHARDS == shard
    ),
    "locked": lambda _: grain.MapDataset.source(Locked("a")),
}


def of_grain(make, num_shards=NUM_SHARDS):
    return sharded_data.sharded(
        lambda shard: make(shard).to_iter_dataset(pipelines.IN_CALLER),
        num_shards=num_shards,
        pipeline="grain",
    )


@pytest.mark.parametrize("name", WHOLE)
def test_a_source_that_is_not_sliced_by_shard_is_refused(name):
    with refused(
        rf"each of the {NUM_SHARDS} shards would read all of .*Dataset.*repeat every"
        rf" example {NUM_SHARDS} times; give each shard its part .*::{NUM_SHARDS}\]"
    ):
        of_grain(WHOLE[name])
    of_grain(WHOLE[name], num_shards=1)


@pytest.mark.parametrize("name", PARTS)
def test_a_source_of_which_each_shard_reads_its_part_is_accepted(name):
    of_grain(PARTS[name])
