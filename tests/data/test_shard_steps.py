"""The identity of a pipeline: its sources, its settings, and S."""

import contextlib
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
from tests import corpora, pipelines

NUM_SHARDS = 4


def refused(match):
    return pytest.raises(errors.ConfigError, match=match)


@pytest.fixture
def files(tmp_path):
    """Parquet files of 40 lists of tokens each."""
    return [write(tmp_path / name, first) for name, first in (("a", 100), ("b", 140))]


def write(path, first):
    held = corpora.documents(first, first + 40)
    return corpora.write_parquet(path, held, group_rows=10)


def rows_of(files, shard, *, num_shards=NUM_SHARDS, window=5, seed=0, length=8):
    """Rows of tokens, by nothing but steps of ours."""
    records = ec_data.Records(
        ec_data.Parquet(files=tuple(files), columns=("tokens",)),
        shard=shard,
        num_shards=num_shards,
        read_options=ec_data.ReadOptions(shuffle_seed=seed),
    )
    documents = ec_data.lm.Documents(column="tokens", tokenizer=None)
    tokens = ec_data.lm.Tokens(records, documents=documents)
    return ec_data.lm.Rows(tokens, length=length, window=window, seed=seed, shard=shard)


def made(files, **settings):
    return sharded_data.sharded(functools.partial(rows_of, files, **settings))


def changes(before, now):
    return state.pipeline_changes(before.identity(), now.identity())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"window": 6}, ["Rows.window: saved 5, now 6"]),
        ({"length": 9}, ["Rows.length: saved 8, now 9"]),
        ({"num_shards": 8}, ["num_logical_shards: saved 4, now 8"]),
        (
            {"seed": 1},
            ["Records.shuffle_seed: saved 0, now 1", "Rows.seed: saved 0, now 1"],
        ),
    ],
)
def test_every_setting_of_our_steps_is_compared(files, settings, expected):
    assert changes(made(files), made(files, **settings)) == expected


def test_other_files_are_named_and_also_one_that_was_replaced(files):
    before = made(files).identity()

    def change(*names):
        (only,) = state.pipeline_changes(before, made(names).identity())
        return only

    added = shutil.copy(files[0], f"{files[0]}2")
    assert change(*files, added) == "Records.files: a2 is new"
    path = pathlib.Path(files[1])
    content = path.read_bytes()
    write(path, 180)
    assert re.match(r"Records.files: b had .* bytes and 40 records", change(*files))
    # A page that is spoilt is a replacement of the same size.
    path.write_bytes(content)
    corpora.spoil(files[1], b"text 150 ")
    assert change(*files).endswith(" and 40, with different content")


def test_steps_of_others_are_compared_by_their_order_and_need_a_name(files):
    def make_shard(shard):
        return rows_of(files, shard).filter(lambda row: row["tokens"][0] % 2 == 0)

    with refused(r"state \(FilterIterDataset\(.*lambda.*; pass pipeline=\"a name"):
        sharded_data.sharded(make_shard)
    one, two = (
        sharded_data.sharded(make_shard, pipeline=f"even, version {number}")
        for number in (1, 2)
    )
    steps, *_ = changes(made(files), one)
    assert re.match(
        r'steps: saved .*"Rows"\], now .*"Rows", "FilterIterDataset"\]', steps
    )
    assert changes(one, two) == [
        'pipeline: saved "even, version 1", now "even, version 2"'
    ]


def test_a_pipeline_that_reads_another_shard_is_refused_when_it_is_made(files):
    def reading_first(wrong):
        return sharded_data.sharded(
            lambda shard: rows_of(files, 0 if shard == wrong else shard)
        )

    second = reading_first(1)
    with refused(r"make_shard\(1\) contains Records\(shard=0 of 4\), which reads"):
        second.make_shard(1)
    with refused(r"make_shard\(3\) contains Records\(shard=0 of 4\)"):
        reading_first(3)


def test_of_a_mixture_weights_may_change_and_settings_of_its_datasets_may_not(files):
    file_of = dict(zip(("web", "code"), files, strict=True))

    def mixed(weights, **settings):
        def make_shard(shard):
            parts = {n: rows_of((file_of[n],), shard, **settings) for n in weights}
            return mixing.Mixture(parts, weights, shard=shard)

        return sharded_data.sharded(make_shard)

    before = mixed({"web": 1, "code": 2})
    for weights in ({"web": 7, "code": 0}, {"web": 1}, {"code": 3}):
        assert changes(before, mixed(weights)) == changes(mixed(weights), before) == []
    assert changes(before, mixed({"web": 1}, window=6)) == [
        "datasets.web.Rows.window: saved 5, now 6"
    ]


def test_the_steps_that_grain_mixes_are_compared(files):
    def mixed(window):
        def make_shard(shard):
            rows = rows_of(files[:1], shard), rows_of(files[1:], shard, window=window)
            return grain.IterDataset.mix(rows, [1, 2])

        return sharded_data.sharded(make_shard, pipeline="mixed")

    (change,) = changes(mixed(5), mixed(6))
    assert change.startswith('MixedIterDataset.parents: saved [[{"name": "Records"')


class Opened(list):
    """A user's source, which has something that it opens itself."""

    def __init__(self, opened):
        super().__init__({"x": np.array(number)} for number in range(60))
        self.opened = opened


def is_of(shard):
    return lambda row: row["x"] % NUM_SHARDS == shard


LISTED = grain.MapDataset.source([*Opened("a")])
NAMED = grain.MapDataset.range(60).map(lambda n: {"x": np.array(n)})


@pytest.mark.parametrize(
    ("make", "is_whole"),
    [
        (lambda _: LISTED, True),
        (lambda _: grain.MapDataset.source(Opened("a")), True),
        (lambda shard: grain.MapDataset.source(Opened(shard)), False),
        # Whatever cannot be compared may be a part.
        (lambda _: grain.MapDataset.source(Opened(threading.Lock())), False),
        (lambda shard: NAMED.shuffle(seed=shard).repeat(2).map(dict), True),
        (lambda shard: NAMED.shuffle(seed=1)[shard::NUM_SHARDS], False),
        (lambda _: NAMED.filter(is_of(1)), True),
        (lambda shard: NAMED.filter(is_of(shard)), False),
        (lambda shard: grain.MapDataset.mix([NAMED[shard::NUM_SHARDS], LISTED]), True),
    ],
)
def test_a_source_that_is_not_sliced_by_shard_is_refused(make, is_whole):
    def sharded(num_shards):
        return sharded_data.sharded(
            lambda shard: make(shard).to_iter_dataset(pipelines.IN_CALLER),
            num_shards=num_shards,
            pipeline="grain",
        )

    sharded(1)
    says = rf"each of the {NUM_SHARDS} shards would read all of .*Dataset"
    with refused(says) if is_whole else contextlib.nullcontext():
        sharded(NUM_SHARDS)
