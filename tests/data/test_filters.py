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


class Never(grain.transforms.Filter):
    def filter(self, element):
        return is_never(element)


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


def in_threads(shard, *chosen):
    return from_map(shard, *chosen, options=grain.ReadOptions(num_threads=2))


def behind_others(shard, *chosen):
    return shuffling.WindowShuffle(from_map(shard, *chosen), window_size=5, seed=1)


def in_a_mixture(shard, *chosen):
    parts = {"one": from_files(shard, *chosen)}
    return mixing.Mixture(parts, {"one": 1}, shard=shard)


MADE = [from_files, from_map, in_threads, behind_others, in_a_mixture]


def world(make_shard, end=elastic_data.End.NEVER):
    data = sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="filters", end=end
    )
    return worlds.World(data, 1, NUM_SHARDS)


@pytest.mark.parametrize(
    ("make", "rejecting", "name"),
    [
        *((make, is_never, "is_never @ ") for make in MADE),
        (from_map, Never(), "Never "),
    ],
)
def test_it_ends_soon_and_names_the_filter(make, rejecting, name, monkeypatch):
    if make is not from_files:
        monkeypatch.setattr(filters, "_MIN_PATIENCE", 1_000)
    # The second of two filters rejects everything.
    rejects = world(lambda shard: make(shard, is_even, rejecting))
    message = rf"the filter {name}.*rejected the last \d+,\d+ elements"
    with pytest.raises(errors.DataError, match=message):
        rejects.batch()


@pytest.mark.parametrize("make", [from_files, behind_others])
def test_a_filter_that_passes_one_element_an_epoch_is_read_for_ever(make):
    seldom = world(lambda shard: make(shard, is_seldom))
    for _ in range(30):
        assert set(seldom.batch()["number"] // NUM_SHARDS) == {17}


def test_two_epochs_are_read_however_many_they_are(monkeypatch):
    monkeypatch.setattr(filters, "_MIN_PATIENCE", 10)
    numbers = grain.MapDataset.range(100).repeat()
    after = iter(range(1000))
    late = numbers.filter(lambda _: next(after) == 199).to_iter_dataset(
        pipelines.IN_CALLER
    )
    filters.Filters().watch(late, endless=True)
    assert next(iter(late)) == 99
    never = numbers.filter(lambda _: False).to_iter_dataset(pipelines.IN_CALLER)
    filters.Filters().watch(never, endless=True)
    with pytest.raises(errors.DataError, match="rejected the last 201 elements"):
        next(iter(never))


def test_pipelines_that_share_a_dataset_are_counted_once():
    shared = from_map(0, is_never)
    for _ in range(3):
        filters.Filters().watch(shared, endless=True)
    (inner,) = shared.parents
    assert inner._filter_fn.function is is_never


@pytest.mark.parametrize("end", [elastic_data.End.PADDED, elastic_data.End.DROPPED])
def test_of_data_that_ends_the_filter_is_named_too(end):
    def make_shard(shard):
        numbers = grain.MapDataset.range(shard, 40, NUM_SHARDS).map(array)
        return numbers.filter(is_never).to_iter_dataset(pipelines.IN_CALLER)

    message = (
        r"none of the 4 logical shards has .*; the filter is_never @ .* last 10 el"
    )
    with pytest.raises(errors.DataError, match=message):
        world(make_shard, end).batch()


def test_a_pipeline_without_filters_that_makes_nothing_is_an_error_too():
    def make_shard(_):
        return grain.MapDataset.range(0).to_iter_dataset(pipelines.IN_CALLER)

    with pytest.raises(errors.DataError, match="check whether a step leaves out all"):
        world(make_shard, elastic_data.End.PADDED).batch()
