"""A filter that rejects everything: the error comes soon, and names it."""

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    filters,
    records,
    sharded_data,
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


def world(make_shard, end=elastic_data.End.NEVER):
    data = sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline="filters", end=end
    )
    return worlds.World(data, 1, NUM_SHARDS)


def test_it_ends_soon_and_names_the_filter():
    # The second of two filters rejects everything.
    rejects = world(lambda shard: from_files(shard, is_even, is_never))
    message = r"the filter is_never @ .*rejected the last \d+,\d+ elements"
    with pytest.raises(errors.DataError, match=message):
        rejects.batch()


def test_a_filter_that_passes_one_element_an_epoch_is_read_forever():
    seldom = world(lambda shard: from_files(shard, is_seldom))
    for _ in range(10):
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


def test_a_pipeline_without_filters_that_makes_nothing_is_an_error_too():
    def make_shard(_):
        return grain.MapDataset.range(0).to_iter_dataset(pipelines.IN_CALLER)

    with pytest.raises(errors.DataError, match="check whether a step leaves out all"):
        world(make_shard, elastic_data.End.PADDED).batch()
