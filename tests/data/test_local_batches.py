"""The iterator for loops without JAX, with both spellings of a state."""

import functools
import itertools
import json

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    example_id,
    local_batches,
    positional,
    sharded_data,
)
from tests import pipelines

NUM_SHARDS = SIZE = 12


def data(pipeline="everything", **more):
    make_shard = functools.partial(pipelines.ALL[pipeline], num_shards=NUM_SHARDS)
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline=pipeline, **more
    )


def world(of, num_ranks):
    return [
        local_batches.LocalBatches(
            of, rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
        )
        for rank in range(num_ranks)
    ]


def next_rows(ranks):
    return [row.tobytes() for rank in ranks for row in next(rank)["tokens"]]


def through_text(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("pipeline", pipelines.ALL)
def test_ranks_that_come_and_go_have_the_batches_of_one(pipeline):
    one = world(data(pipeline), 1)
    ranks = world(data(pipeline), 4)
    for num_ranks in (3, 6, 1, 12):
        assert next_rows(ranks) == next_rows(one)
        saved = [through_text(rank.state_dict()) for rank in ranks]
        ranks = world(data(pipeline), num_ranks)
        for rank in ranks:
            rank.load_state_dict(saved)
    assert next_rows(ranks) == next_rows(one)


def test_both_spellings_mean_the_same():
    (one,) = world(data(), 1)
    next(one)
    saved = one.get_state()
    assert saved == one.state_dict()
    expected = next_rows([one])
    (other,) = world(data(), 1)
    other.set_state(through_text(saved))
    assert next_rows([other]) == expected


def test_the_positional_engine_has_the_same_states(corpus):
    records = positional.PositionalData(files=(corpus,), max_target_length=16)
    one, other = (
        local_batches.LocalBatches(records, global_batch_size=SIZE) for _ in range(2)
    )
    next(one)
    other.load_state_dict(through_text(one.state_dict()))
    np.testing.assert_array_equal(next(one)["inputs"], next(other)["inputs"])
    one.close()
    other.close()


def test_a_rank_that_lacks_shards_says_so():
    ranks = world(data(), 4)
    next_rows(ranks)
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match=r"lacks logical shards \[3, 4.*as a"):
        one.load_state_dict(ranks[0].state_dict())


def test_states_of_two_moments_are_refused():
    ranks = world(data(), 2)
    first = ranks[0].state_dict()
    next_rows(ranks)
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match=r"rank 1 is that of .*at the same"):
        one.load_state_dict([first, ranks[1].state_dict()])


def test_a_state_of_another_pipeline_or_program_is_refused():
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match='saved "everything", now "plain"'):
        world(data("plain"), 1)[0].set_state(one.get_state())
    with pytest.raises(errors.DataError, match="not one of version 1"):
        one.set_state({"_num_yielded": 3})


def test_data_that_ends_has_to_be_agreed_on(corpus):
    finite = positional.PositionalData(
        files=(corpus,), max_target_length=16, num_epochs=1, num_threads=0
    )
    with pytest.raises(errors.ConfigError, match="give LocalBatches agree="):
        world(finite, 2)
    one = local_batches.LocalBatches(finite, global_batch_size=SIZE)
    batches = list(one)
    assert [int(b[elastic_data.MASK].sum()) for b in batches] == [12] * 8 + [4]
    ids = itertools.chain.from_iterable(
        example_id.join(b["example_id"][b[elastic_data.MASK]]) for b in batches
    )
    assert sorted(ids) == list(range(100))
    one.close()
