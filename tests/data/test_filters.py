"""A filter that rejects everything: the error comes soon, and names it."""

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    filters,
    mixing,
    records,
    sharded_data,
    shuffling,
)
from tests import corpora, pipelines, worlds

NUM_SHARDS = 4


def is_never(element):
    return element["number"] < 0


def is_seldom(element):
    return element["number"] // NUM_SHARDS == 17


def is_even(element):
    return element["number"] % 2 == 0


def array(number):
    return {"number": np.array(number)}


def from_files(shard, *chosen):
    dataset = corpora.Numbers(blocks=((10,) * 12,))
    reading = records.ReadOptions(shuffle_seed=1)
    actual = records.Records(
        dataset, shard=shard, num_shards=NUM_SHARDS, read_options=reading
    )
    actual = actual.map(lambda element: array(element["number"]))
    for each in chosen:
        actual = actual.filter(each)
    return actual


def from_map(shard, *chosen, options=pipelines.IN_CALLER):
    actual = grain.MapDataset.range(shard, 120, NUM_SHARDS).repeat().map(array)
    for each in chosen:
        actual = actual.filter(each)
    return actual.to_iter_dataset(options)


def behind_others(shard, *chosen):
    return shuffling.WindowShuffle(from_map(shard, *chosen), window_size=5, seed=1)


def in_a_mixture(shard, *chosen):
    parts = {"one": from_files(shard, *chosen)}
    return mixing.Mixture(parts, {"one": 1}, shard=shard)


def world(make_shard, end=elastic_data.End.NEVER):
    data = sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="filters", end=end
    )
    return worlds.World(data, 1, NUM_SHARDS)


@pytest.mark.parametrize("make", [from_files, behind_others, in_a_mixture])
def test_it_ends_soon_and_names_the_filter(make, monkeypatch):
    if make is not from_files:
        monkeypatch.setattr(filters, "_MIN_PATIENCE", 1_000)
    # The second of two filters rejects everything.
    rejects = world(lambda shard: make(shard, is_even, is_never))
    message = r"the filter is_never @ .*rejected the last \d+,\d+ elements"
    with pytest.raises(errors.DataError, match=message):
        rejects.batch()


@pytest.mark.parametrize("make", [from_files, behind_others])
def test_a_filter_that_passes_one_element_an_epoch_is_read_forever(make):
    seldom = world(lambda shard: make(shard, is_seldom))
    for _ in range(10):
        assert set(seldom.batch()["number"] // NUM_SHARDS) == {17}


def test_of_data_that_ends_the_filter_is_named_too():
    def make_shard(shard):
        numbers = grain.MapDataset.range(shard, 40, NUM_SHARDS).map(array)
        return numbers.filter(is_never).to_iter_dataset(pipelines.IN_CALLER)

    message = (
        r"none of the 4 logical shards has .*; the filter is_never @ .* last 10 el"
    )
    with pytest.raises(errors.DataError, match=message):
        world(make_shard, elastic_data.End.PADDED).batch()


def test_a_pipeline_without_filters_that_makes_nothing_is_an_error_too():
    def make_shard(_):
        return grain.MapDataset.range(0).to_iter_dataset(pipelines.IN_CALLER)

    with pytest.raises(errors.DataError, match="check whether a step leaves out all"):
        world(make_shard, elastic_data.End.PADDED).batch()
