"""Rows of ranks, and of the workers of their PyTorch loaders, and their states."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import pathlib
import pickle

import grain
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    local_batches,
    positional_data,
    rows,
    shard_rows,
    sharded_data,
    stages,
)
from tests import conftest, pipelines, worlds
from tests.pipelines import sharded

SIZE = 12


def save(ranks):
    """One copy of each entry, by the first rank that has it, as PyTorch saves them."""
    saved = {}
    for rank in ranks:
        saved = local_batches.ShardedState(rank).state_dict() | saved
    return saved


class Loader:
    """A rank's loader as PyTorch's: its workers, in turn, read two batches ahead.

    Its state is that of each worker after the last batch delivered.
    """

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


def through_text(state, *, in_order=True):
    """A state as JSON; torchdata gives it back with its keys in another order."""
    order = list if in_order else reversed
    return json.loads(json.dumps(state), object_pairs_hook=lambda p: dict(order(p)))


def world(data, num_ranks=1, size=SIZE, *, num_workers=0, states=None, **more):
    """The ranks of a world, each with a loader; at the states of another one."""
    made = []
    for rank in range(num_ranks):
        batches = local_batches.LocalBatches(
            data, rank=rank, num_ranks=num_ranks, global_batch_size=size, **more
        )
        if isinstance(states, dict):
            # Each rank reads the entries that its own state names.
            by_shard = local_batches.ShardedState(batches)
            own = {name: states[name] for name in by_shard.state_dict()}
            by_shard.load_state_dict(own)
        elif states is not None:
            batches.load_state_dict(states)
        made.append(Loader(batches, num_workers) if num_workers else batches)
    return made


def next_rows(ranks):
    """The rows of the next global batch, by rank."""
    return [row for rank in ranks for row in worlds.by_row(next(rank))]


# Ranks and rows; workers; batches ahead, and taken; how old a state, and its form.
WORLDS = st.tuples(
    st.sampled_from(
        [(r, b) for b in (6, 12, 24, 8, 5) for r in (1, 2, 3) if not b % r]
    ),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 2),
    st.booleans(),
)


def in_stages(data, *begins):
    return stages.staged([stages.Stage(begin=begin, data=data) for begin in begins])


def positional():
    numbers = grain.MapDataset.range(100).repeat()
    examples = numbers.map(lambda n: {"x": np.array([n, n * n])})
    return positional_data.positional(examples, pipeline="numbers")


@pytest.mark.parametrize("name", [*pipelines.ALL, "positional"])
@settings(max_examples=6)
@given(
    # Multiples and divisors of the batches, neither, and shards that ranks share.
    num_shards=st.sampled_from([12, 24, 6]),
    history=st.lists(WORLDS, min_size=2, max_size=4),
)
def test_any_history_of_ranks_and_workers_has_the_rows_of_one_host(
    name, num_shards, history
):
    is_sharded = name in pipelines.ALL
    data = in_stages(sharded(name, num_shards), 0) if is_sharded else positional()
    saved = [(None, None)]
    for (num_ranks, size), num_workers, ahead, num_batches, back, by_shard in history:
        of_one, states = saved[-1 - back % len(saved)]
        one = worlds.World(data, 1, size)
        if of_one:
            one.load(of_one)
        how = {"num_workers": num_workers, "read_ahead": ahead}
        ranks = world(data, num_ranks, size, states=states, **how)
        if isinstance(states, dict):
            assert save(ranks) == states
        for _ in range(num_batches):
            assert next_rows(ranks) == one.next()
        of_one = one.save()
        states = [through_text(rank.state_dict()) for rank in ranks]
        for state in states:
            assert state["position"] == of_one[0]
            if is_sharded:
                step = sum(number for _, number in of_one[0]["batches"])
                assert state["progress"] == {"step": step, "begun": 1}
        saved.append((of_one, save(ranks) if by_shard else states))


# Ranks, and the workers of the loader of one.
FINITE_WORLDS = st.sampled_from([(1, 0), (2, 0), (1, 2), (1, 3)])


@settings(max_examples=8)
@given(
    # Of documents of the mixture; some shards have none.
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    packing=st.sampled_from([None, "", "first_fit", "concat_then_split"]),
    num_shards=st.sampled_from([1, 2, 4, 6, 9, 12]),
    size=st.sampled_from([4, 6, 12]),
    saved_by=FINITE_WORLDS,
    loaded_by=FINITE_WORLDS,
    ahead=st.integers(0, 2),
)
def test_finite_data_continues_after_each_of_its_batches_however_it_was_saved(
    tmp_path_factory, sizes, packing, num_shards, size, saved_by, loaded_by, ahead
):
    make_shard = functools.partial(
        pipelines.mixture, num_shards=num_shards, packing=packing, sizes=sizes
    )
    data = sharded_data.sharded(
        make_shard, num_shards=num_shards, pipeline="mixture", end="padded"
    )
    # Ranks agree that there is more: all batches after the end are padding.
    opened = functools.partial(
        world, data, size=size, agree=functools.partial(operator.or_, True)
    )
    (one,), (num_ranks, num_workers) = opened(), saved_by
    expected = [next_rows([one]) for _ in range(5)]
    ranks = opened(num_ranks, num_workers=num_workers, read_ahead=ahead)
    hosts = worlds.World(data, num_ranks, size)
    for number in range(5):
        states = [through_text(rank.state_dict(), in_order=False) for rank in ranks]
        hosts.write(directory := tmp_path_factory.mktemp("data"))
        others = worlds.World(data, loaded_by[0], size)
        others.read(directory)
        ways = [
            opened(loaded_by[0], num_workers=loaded_by[1], states=each)
            for each in (states, save(ranks))
        ]
        if not num_workers:
            ways.append(pickle.loads(pickle.dumps(ranks)))  # noqa: S301
        for following in expected[number:]:
            assert worlds.by_row(others.whole()) == following
            assert all(next_rows(way) == following for way in ways)
        assert next_rows(ranks) == worlds.by_row(hosts.whole()) == expected[number]


@pytest.mark.parametrize("data", [sharded("plain"), positional()])
@pytest.mark.parametrize(
    ("module", "name"), [(rows, "after"), (shard_rows, "with_ids")]
)
def test_an_interruption_in_a_batch_loses_none(monkeypatch, data, module, name):
    (one,), (same,) = world(data), world(data)
    expected = [next_rows([same]) for _ in range(4)]
    function, calls = getattr(module, name), itertools.count()

    def interrupted(*args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(module, name, interrupted)
    found = []
    while len(found) < 4:
        with contextlib.suppress(KeyboardInterrupt):
            found.append(next_rows([one]))
    assert found == expected


def test_a_state_of_a_users_iterator_comes_back_as_it_was():
    state = {
        "number": 3,
        1: {"a": 2, (3, "b"): [4]},
        "key": b"\x00\xff",
        "seen": {b"one": 1},
        "generator": np.random.RandomState(7).get_state(legacy=False),
        "()": {"()": [1]},
        "none": {},
        "counts": np.zeros(2),
    }
    saved, before = shard_rows.to_json(state), repr(state)
    # Iterators change theirs in its place.
    state["counts"] += 1
    loaded = shard_rows.from_json(through_text(saved))
    assert repr(loaded) == before
    loaded["counts"] += 1
    assert repr(loaded) == repr(state)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda _: None, "rank 0 is not a data state; load a state that LocalBatches"),
        (lambda _: [], "rank 0 is not a data state"),
        (lambda _: {"_num_yielded": 3}, "rank 0 is not a data state"),
        (lambda own: [own, None], "rank 1 is not a data state"),
        (lambda own: own | {"version": 2}, "version 2, but this release reads"),
        (lambda own: own | {"at_end": True}, "rank 0 was altered"),
        (lambda own: [own, of_part(0, 1, 0)], "rank 1 has position .*the same step"),
        (lambda _: [of_part(0, 4, 1)], r"logical shards: \[3, 4.*as a list"),
        (
            lambda _: world(sharded("plain"))[0].state_dict(),
            'saved "plain", now "everything"',
        ),
    ],
)
def test_what_is_no_state_of_all_ranks_is_refused_and_the_position_stays(
    other, problem
):
    (one,), (same,) = world(sharded("everything")), world(sharded("everything"))
    next(one)
    next(same)
    with pytest.raises(errors.DataError, match=problem):
        one.set_state(other(through_text(one.get_state())))
    assert next_rows([one]) == next_rows([same])


def of_part(rank, num_ranks, num_batches):
    ranks = world(sharded("everything"), num_ranks)
    for _ in range(num_batches):
        next_rows(ranks)
    return ranks[rank].state_dict()


ROOM = pathlib.Path(elastic_data.__file__).parent
SCHEMA = json.loads((ROOM / "schemas" / "data_state.json").read_text())


def test_a_state_is_of_the_schema_and_of_the_golden_file():
    # Without its steps, which depend on Grain's own names for them.
    make_shard = sharded("everything").make_shard.make_shard
    (one,) = world(dataclasses.replace(sharded("everything"), make_shard=make_shard))
    for _ in range(3):
        next(one)
    saved = one.get_state()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(saved, SCHEMA)
    assert saved == json.loads((conftest.GOLDEN / "local_batches_v1.json").read_text())


# Images whose last bytes are NULs, and texts likewise.
BLOBS = [b"\x89PNG\0\0", b"JFIF", b"\0", b"", b"GIF\0", b"a", b"\0\0a\0", b"b" * 9]


def blob(n):
    return {
        "image": BLOBS[n],
        "text": BLOBS[n].decode("latin1"),
        "parts": [BLOBS[n], b"\0"],
        "maybe": BLOBS[n] if n % 2 else None,
        "number": n,
    }


def blobs(shard):
    drawn = grain.MapDataset.range(shard, len(BLOBS), 2).map(blob)
    return drawn.to_iter_dataset(pipelines.IN_CALLER)


ENDING = sharded_data.sharded(blobs, num_shards=2, pipeline="blobs", end="padded")
POSITIONAL = positional_data.positional(
    grain.MapDataset.range(len(BLOBS)).map(blob), pipeline="blobs"
)


@pytest.mark.parametrize("data", [ENDING, POSITIONAL], ids=lambda data: data.engine)
def test_bytes_and_text_are_delivered_as_they_are(data):
    found = collections.defaultdict(list)
    for batch in world(data, size=6)[0]:
        assert batch["image"].dtype == batch["text"].dtype == object
        assert batch["number"].dtype == np.int64
        assert set(batch["image"][~batch["mask"]]) <= {b""}
        for name in blob(0):
            found[name] += batch[name][batch["mask"]].tolist()
    order = np.argsort(found["number"])
    assert {name: [of[n] for n in order] for name, of in found.items()} == {
        name: [blob(n)[name] for n in range(len(BLOBS))] for name in blob(0)
    }


def test_a_rank_ends_when_all_do():
    asked = []

    def agree(has_rows):
        asked.append(has_rows)
        return len(asked) < 4

    rank, _ = world(ENDING, 2, size=6, agree=agree)
    # Of 4 examples in its shard it has 3 in each batch.
    assert [int(batch["mask"].sum()) for batch in rank] == [3, 1, 0]
    assert asked == [True, True, False, False]


def test_ranks_and_workers_of_a_loader_that_would_have_to_agree_are_refused():
    ends = sharded("plain", end="padded")
    with pytest.raises(errors.ConfigError, match="pass agree="):
        world(ends, 2)
    for data, num_ranks in ((ends, 2), (in_stages(sharded("plain"), 0, 2), 1)):
        batches, *_ = world(data, num_ranks, agree=bool)
        with pytest.raises(errors.ConfigError, match=r"2 workers of a loader take"):
            local_batches.of_worker(batches, 0, 2)
        local_batches.of_worker(batches, 0, 1)


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 6]), st.sampled_from([6, 12]))
def test_no_worker_runs_a_shard_of_another_if_there_are_as_many_as_suggested(
    num_workers, num_ranks, size
):
    num_shards = rows.suggest_num_shards(
        [1, 2, 3, 4, 6], [6, 12], loader_workers=[1, num_workers]
    )
    placements = [
        dataclasses.replace(each, every=num_workers, first=number)
        for each in rows.in_order(num_ranks, size)
        for number in range(num_workers)
    ]
    assert rows.shard_reads(num_shards, placements) == 1


def test_entries_that_do_not_belong_together_are_refused():
    two, (one,) = world(sharded("everything"), 2), world(sharded("everything"))
    next_rows(two)
    saved, before, name = save(two), save([one]), "shard_00003"
    next_rows(two)
    altered = saved[name].replace('"cursors": {', '"cursors": {"a": 1, ')
    for wrong, problem in (
        (saved | {name: save(two)[name]}, "entry 'shard_00003' has position"),
        (dict([*saved.items()][:-1]), r"logical shards: \[\d+\]"),
        ({name: saved[name]}, "lacks the part with its pipeline"),
        (saved | {name: altered}, "'shard_00003'.*digest differs"),
        (saved | {name: None}, "'shard_00003'.*is not a data state"),
        (saved | {"position": "{"}, "'position'.*is truncated"),
    ):
        with pytest.raises(errors.DataError, match=problem):
            local_batches.ShardedState(one).load_state_dict(wrong)
    assert save([one]) == before
