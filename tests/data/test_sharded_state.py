"""The state by logical shard: what `torch.distributed.checkpoint` does with it."""

import functools
import json

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    local_batches,
    sharded_data,
    sharded_state,
)
from tests import pipelines

NUM_SHARDS = SIZE = 12


def sharded():
    return sharded_data.sharded(
        functools.partial(pipelines.everything, num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
        pipeline="everything",
    )


def world(data, num_ranks):
    return [
        local_batches.LocalBatches(
            data, rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
        )
        for rank in range(num_ranks)
    ]


def next_rows(ranks):
    return [row.tobytes() for rank in ranks for row in next(rank)["tokens"]]


def save(ranks):
    """One copy of each entry, by the first rank that has it."""
    saved = {}
    for rank in ranks:
        saved = sharded_state.ShardedState(rank).state_dict() | saved
    return saved


def load(ranks, saved):
    """Each rank reads the entries that its own state names."""
    for rank in ranks:
        state = sharded_state.ShardedState(rank)
        state.load_state_dict({name: saved[name] for name in state.state_dict()})


def test_any_ranks_load_what_any_ranks_saved():
    data = sharded()
    one, ranks = world(data, 1), world(data, 4)
    for num_ranks in (3, 1, 6, 2):
        for _ in range(2):
            assert next_rows(ranks) == next_rows(one)
        saved = save(ranks)
        ranks = world(data, num_ranks)
        load(ranks, saved)
        # What was loaded can be saved before anything else is read.
        assert save(ranks) == saved
    assert next_rows(ranks) == next_rows(one)


def test_what_does_not_belong_together_is_refused():
    two = world(sharded(), 2)
    next_rows(two)
    saved = save(two)
    next_rows(two)
    another = save(two)["shard_00003"]
    ranks = world(sharded(), 1)
    before = save(ranks)
    missing = {name: each for name, each in saved.items() if name != "shard_00007"}
    altered = saved["shard_00003"].replace('"cursor": {', '"cursor": {"a": 1, ')
    for wrong, problem in (
        (saved | {"shard_00003": another}, "'shard_00003' of the data state has pos"),
        (missing, r"lacks logical shards \[7\]"),
        ({"shard_00003": another}, "has no entry 'position'"),
        (saved | {"shard_00003": altered}, "'shard_00003'.*digest differs"),
        (saved | {"shard_00003": None}, "'shard_00003'.*is cut short"),
        (saved | {"position": json.dumps({"version": 1})}, "'position'.*altered"),
    ):
        with pytest.raises(errors.DataError, match=problem):
            sharded_state.ShardedState(ranks[0]).load_state_dict(wrong)
    assert save(ranks) == before
