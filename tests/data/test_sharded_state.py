"""The state by logical shard: what `torch.distributed.checkpoint` does with it."""

import functools
import json

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    local_batches,
    positional_data,
    sharded_data,
    sharded_state,
)
from tests import pipelines

NUM_SHARDS = SIZE = 12


def sharded(name="everything"):
    return sharded_data.sharded(
        functools.partial(pipelines.ALL[name], num_shards=NUM_SHARDS),
        num_shards=NUM_SHARDS,
        pipeline=name,
    )


def world(data, num_ranks):
    return [
        local_batches.LocalBatches(
            data, rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
        )
        for rank in range(num_ranks)
    ]


def next_rows(ranks):
    batches = [next(rank) for rank in ranks]
    feature = "tokens" if "tokens" in batches[0] else "inputs"
    return [row.tobytes() for batch in batches for row in batch[feature]]


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


@pytest.mark.parametrize("engine", ["sharded", "positional"])
def test_any_ranks_load_what_any_ranks_saved(engine, corpus):
    data = sharded()
    if engine == "positional":
        data = positional_data.positional((corpus,), max_target_length=8, num_threads=0)
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


def test_a_state_before_the_first_batch_is_loaded_too():
    ranks = world(sharded(), 3)
    load(ranks, save(world(sharded(), 2)))
    assert next_rows(ranks) == next_rows(world(sharded(), 1))


def saved_entries():
    ranks = world(sharded(), 2)
    next_rows(ranks)
    return save(ranks)


def test_what_does_not_belong_together_is_refused():
    saved = saved_entries()
    ranks = world(sharded(), 1)
    before = save(ranks)
    later = world(sharded(), 1)
    for _ in range(2):
        next_rows(later)
    another = save(later)["shard_00003"]
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


def test_the_state_of_another_pipeline_is_refused():
    ranks = world(sharded("plain"), 1)
    with pytest.raises(errors.DataError, match="another pipeline"):
        load(ranks, saved_entries())


def numbers(shard):
    drawn = grain.MapDataset.range(shard, 2 * NUM_SHARDS, NUM_SHARDS)
    examples = drawn.map(lambda number: {"tokens": np.array(number)})
    return examples.to_iter_dataset(pipelines.IN_CALLER)


def test_data_that_has_ended_is_known_to_have():
    data = sharded_data.sharded(
        numbers, num_shards=NUM_SHARDS, pipeline="n", end=elastic_data.End.PADDED
    )
    (one,) = world(data, 1)
    assert len(list(one)) == 2
    (again,) = world(data, 1)
    load([again], save([one]))
    assert again.at_end
