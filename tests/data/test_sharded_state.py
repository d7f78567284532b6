"""The state by logical shard: what `torch.distributed.checkpoint` does with it."""

import json

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import sharded_state
from tests.data import test_loader_workers
from tests.data.test_loader_workers import next_rows, world

SIZE = 12
DATA = test_loader_workers.sharded("everything", 12)


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
    one, ranks = world(DATA, 1, SIZE), world(DATA, 4, SIZE)
    for num_ranks in (3, 1, 6, 2):
        for _ in range(2):
            assert next_rows(ranks) == next_rows(one)
        saved = save(ranks)
        ranks = world(DATA, num_ranks, SIZE)
        load(ranks, saved)
        # What was loaded can be saved before anything else is read.
        assert save(ranks) == saved
    assert next_rows(ranks) == next_rows(one)


def test_what_does_not_belong_together_is_refused():
    two = world(DATA, 2, SIZE)
    next_rows(two)
    saved = save(two)
    next_rows(two)
    another = save(two)["shard_00003"]
    ranks = world(DATA, 1, SIZE)
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
