"""A filter that rejects everything is an error, which comes soon."""

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
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


def test_two_filters_of_which_the_second_rejects_everything_are_an_error():
    rejects = world(lambda shard: from_files(shard, is_even, is_never))
    with pytest.raises(errors.DataError, match="made no row; check whether a filter"):
        rejects.batch()


def test_a_filter_that_passes_one_element_an_epoch_is_read_forever():
    seldom = world(lambda shard: from_files(shard, is_seldom))
    for _ in range(10):
        assert set(seldom.batch()["number"] // NUM_SHARDS) == {17}


def test_a_pipeline_without_filters_that_makes_nothing_is_an_error_too():
    def make_shard(_):
        return grain.MapDataset.range(0).to_iter_dataset(pipelines.IN_CALLER)

    with pytest.raises(errors.DataError, match="check whether a filter"):
        world(make_shard, elastic_data.End.PADDED).batch()
