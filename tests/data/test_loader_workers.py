"""Workers of a PyTorch loader: they take the batches of a rank in turn.

The loader is played here: it deals batches to its workers in turn, lets each read ahead
of what it delivers, and keeps the state of each worker after the last batch delivered.
"""

import dataclasses
import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    example_id,
    local_batches,
    rows,
    sharded_data,
    stages,
)
from tests import pipelines


class Loader:
    """A rank's loader with some workers, each of which reads two batches ahead."""

    def __init__(self, batches, num_workers):
        self._workers = [
            local_batches.of_worker(batches, worker, num_workers)
            for worker in range(num_workers)
        ]
        self._ahead = [[] for _ in self._workers]
        self._states = [through_text(worker.state_dict()) for worker in self._workers]
        self._turn = 0

    def __next__(self):
        worker = self._turn % len(self._workers)
        ahead = self._ahead[worker]
        while len(ahead) < 2:
            batch = next(self._workers[worker])
            ahead.append((batch, through_text(self._workers[worker].state_dict())))
        batch, self._states[worker] = ahead.pop(0)
        self._turn += 1
        return batch

    def state_dict(self):
        return local_batches.merged(self._states)


def through_text(state):
    return json.loads(json.dumps(state))


def world(data, num_ranks, size, num_workers=0, states=None):
    """The ranks of a world, each with a loader; at `states` of another one."""
    made = []
    for rank in range(num_ranks):
        batches = local_batches.LocalBatches(
            data, rank=rank, num_ranks=num_ranks, global_batch_size=size
        )
        if states is not None:
            batches.load_state_dict(states)
        made.append(Loader(batches, num_workers) if num_workers else batches)
    return made


def next_rows(ranks, feature="tokens"):
    """The rows of the next global batch, by rank; their ids first."""
    batches = [next(rank) for rank in ranks]
    return [
        (number, row.tobytes())
        for batch in batches
        for number, row in zip(
            example_id.join(batch["example_id"]), batch[feature], strict=True
        )
    ]


def sharded(name, num_shards):
    return sharded_data.sharded(
        functools.partial(pipelines.ALL[name], num_shards=num_shards),
        num_shards=num_shards,
        pipeline=name,
    )


WORLDS = st.tuples(st.sampled_from([1, 2, 3, 6]), st.integers(0, 4), st.integers(0, 3))


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.sampled_from(["first_fit", "everything", "shuffled"]),
    # Multiples and divisors of the shards, neither, and shards that ranks share.
    st.sampled_from([(12, 12), (6, 12), (24, 12), (48, 6), (18, 12), (8, 12), (5, 6)]),
    st.lists(WORLDS, min_size=1, max_size=3),
)
def test_any_history_of_ranks_and_workers_has_the_rows_of_one(name, sizes, history):
    num_shards, size = sizes
    data = sharded(name, num_shards)
    one, states = world(data, 1, size), None
    for num_ranks, num_workers, num_batches in history:
        ranks = world(data, num_ranks, size, num_workers, states)
        for _ in range(num_batches):
            assert next_rows(ranks) == next_rows(one)
        states = [through_text(rank.state_dict()) for rank in ranks]
        alone = world(data, 1, size, 0, [through_text(one[0].state_dict())])
        merged = world(data, 1, size, 0, states)
        assert next_rows(merged) == next_rows(alone)


def test_workers_of_several_ranks_cannot_agree_on_an_end():
    data = dataclasses.replace(sharded("plain", 12), end=elastic_data.End.PADDED)
    batches = local_batches.LocalBatches(
        data, num_ranks=2, global_batch_size=12, agree=bool
    )
    with pytest.raises(errors.ConfigError, match="2 workers of a loader take.*agree"):
        local_batches.of_worker(batches, 0, 2)


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([6, 12]))
def test_no_worker_runs_a_shard_of_another_if_there_are_as_many_as_suggested(
    num_workers, num_ranks, size
):
    num_shards = rows.suggest_num_shards(
        [1, 2, 3, 4, 6], [6, 12], loader_workers=[1, num_workers]
    )
    if size % num_ranks:
        return
    run = []
    for rank in range(num_ranks):
        placement = rows.Placement.in_order(
            rank, num_hosts=num_ranks, global_batch_size=size
        )
        for first in range(num_workers):
            worker = dataclasses.replace(placement, every=num_workers, first=first)
            run += worker.shards(num_shards, 24).tolist()
    assert sorted(run) == list(range(num_shards))


def test_the_state_of_a_worker_is_that_of_the_rank_after_its_last_batch():
    (one,), (batches,) = (world(sharded("first_fit", 12), 1, 12) for _ in range(2))
    worker = local_batches.of_worker(batches, 1, 2)
    for _ in range(2):
        next(worker)
        next(one)
        next(one)
        batches.load_state_dict(through_text(worker.state_dict()))
        assert next_rows([batches]) == next_rows([one])
        one.load_state_dict(through_text(worker.state_dict()))


def test_the_state_of_a_worker_that_runs_some_shards_is_refused():
    (batches,) = world(sharded("plain", 24), 1, 12)
    worker = local_batches.of_worker(batches, 1, 2)
    with pytest.raises(errors.DataError, match=r"lacks logical shards \[0, 2, 4, 6"):
        batches.load_state_dict(through_text(worker.state_dict()))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_count_the_steps_of_a_run_of_stages(num_workers):
    stage = stages.Stage(begin=0, data=sharded("plain", 12), global_batch_size=12)
    data = stages.staged([stage])
    ((one,), (loader,)) = world(data, 1, 12), world(data, 1, 12, num_workers)
    for _ in range(5):
        next(loader)
        next(one)
        assert loader.state_dict()["progress"] == one.state_dict()["progress"]
