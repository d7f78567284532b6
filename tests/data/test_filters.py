"""A filter that rejects everything is an error, which comes soon."""

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    records,
    sharded_data,
)
from tests import corpora, worlds

NUM_SHARDS = 4


def is_never(element):
    return element["number"] < 0


def is_seldom(element):
    return element["number"] // NUM_SHARDS == 17


def is_even(element):
    return element["number"] % 2 == 0


def world(*chosen):
    def make_shard(shard):
        actual = records.Records(
            corpora.Numbers(blocks=((10,) * 12,)),
            shard=shard,
            num_shards=NUM_SHARDS,
            read_options=records.ReadOptions(shuffle_seed=1),
        ).map(lambda element: {"number": np.array(element["number"])})
        for each in chosen:
            actual = actual.filter(each)
        return actual

    data = sharded_data.sharded(make_shard, num_shards=NUM_SHARDS, pipeline="filters")
    return worlds.World(data, 1, NUM_SHARDS)


def test_two_filters_of_which_the_second_rejects_everything_are_an_error():
    with pytest.raises(errors.DataError, match="made no row; check whether a filter"):
        world(is_even, is_never).batch()


def test_a_filter_that_passes_one_element_an_epoch_is_read_forever():
    seldom = world(is_seldom)
    for _ in range(10):
        assert set(seldom.batch()["number"] // NUM_SHARDS) == {17}
