import functools
import itertools
import json

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import example_id, rows, sharded
from tests import iterator_contract, pipelines

HOSTS = [1, 2, 3, 4, 6, 12]
NUM_SHARDS = 12


def make(pipeline, num_shards=NUM_SHARDS):
    make_shard = functools.partial(pipelines.ALL[pipeline], num_shards=num_shards)
    return sharded.sharded(make_shard, num_shards=num_shards, pipeline=pipeline)


class World:
    """All hosts of a world, whose batches lie in the order of the hosts."""

    def __init__(self, data, num_hosts, size):
        self.size = size
        self.hosts = [
            data.host_batches(
                rows.Placement.in_order(
                    host, num_hosts=num_hosts, global_batch_size=size
                )
            )
            for host in range(num_hosts)
        ]

    def next(self):
        """The next global batch, row after row, as (id, bytes of every feature)."""
        found = []
        for host in self.hosts:
            batch = next(host)
            ids = example_id.join(batch.pop("example_id"))
            features = zip(*batch.values(), strict=True)
            found += [
                (id_, *(feature.tobytes() for feature in row))
                for id_, row in zip(ids, features, strict=True)
            ]
        assert len(found) == self.size
        return found

    def save(self):
        (position,) = {json.dumps(host.position()) for host in self.hosts}
        saved = [host.shard_cursors() for host in self.hosts]
        merged = {shard: cursor for one in saved for shard, cursor in one.items()}
        assert len(merged) == sum(map(len, saved))
        return json.loads(json.dumps([json.loads(position), sorted(merged.items())]))

    def load(self, saved):
        position, cursors = saved
        cursors = dict(map(tuple, cursors))
        for host in self.hosts:
            host.go_to(position, lambda shards: {s: cursors[s] for s in shards})


def stream(data, num_rows):
    """The rows of the run in stream order, from one host and batches of one round."""
    one = World(data, 1, NUM_SHARDS)
    found = [row for _ in range(-(-num_rows // NUM_SHARDS)) for row in one.next()]
    return found[:num_rows]


@pytest.mark.parametrize("pipeline", pipelines.ALL)
@pytest.mark.parametrize("size", [12, 24, 4], ids=["blocked", "twice", "windowed"])
def test_every_number_of_hosts_gives_the_batches_of_one_host(pipeline, size):
    data = make(pipeline)
    one = World(data, 1, size)
    worlds = [World(data, hosts, size) for hosts in HOSTS if size % hosts == 0]
    for _ in range(6):
        expected = one.next()
        assert all(world.next() == expected for world in worlds)


@pytest.mark.parametrize("pipeline", pipelines.ALL)
def test_the_state_before_every_batch_continues_on_another_number_of_hosts(pipeline):
    data = make(pipeline)
    one = World(data, 1, 12)
    counts = itertools.cycle([4, 3, 1, 6, 2, 12])
    world = World(data, next(counts), 12)
    for _ in range(20):
        saved = world.save()
        world = World(data, next(counts), 12)
        world.load(saved)
        assert world.next() == one.next()


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(pipelines.ALL)),
    st.lists(
        st.tuples(
            st.sampled_from(HOSTS),
            st.sampled_from([4, 6, 12, 24, 36]),
            st.integers(1, 5),
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_any_schedule_of_hosts_and_batch_sizes_yields_the_stream_once(pipeline, worlds):
    data = make(pipeline)
    saved, used = None, []
    for num_hosts, size, num_batches in worlds:
        if size % num_hosts:
            num_hosts = 1
        world = World(data, num_hosts, size)
        if saved:
            world.load(saved)
        for _ in range(num_batches):
            batch = world.next()
            begin = len(used)
            used += batch
            ids = sorted(row[0] for row in batch)
            assert ids == list(range(begin, begin + size))
        saved = world.save()
    assert sorted(used) == stream(data, len(used))


def test_hosts_that_do_not_fit_the_shards_load_the_right_rows_in_other_places():
    data = make("first_fit")
    one, three = World(data, 1, 18), World(data, 3, 18)
    in_place = []
    for _ in range(4):
        expected, found = one.next(), three.next()
        assert sorted(found) == sorted(expected)
        in_place.append(found == expected)
    assert not any(in_place)


def test_a_cursor_is_small_and_a_shard_that_yielded_nothing_has_none():
    world = World(make("everything"), 1, 4)
    _, cursors = world.save()
    assert [cursor for _, cursor in cursors] == [None] * 12
    world.next()
    _, cursors = world.save()
    assert [shard for shard, cursor in cursors if cursor] == [0, 1, 2, 3]
    assert all(len(json.dumps(c, separators=(",", ":"))) <= 200 for _, c in cursors)


def test_a_shard_that_ends_is_named():
    finite = sharded.sharded(
        lambda shard: (
            pipelines.grain.MapDataset.range(shard + 1)
            .map(lambda number: {"x": np.array(number)})
            .to_iter_dataset()
        ),
        num_shards=2,
    )
    world = World(finite, 1, 2)
    world.next()
    before = world.save()
    with pytest.raises(errors.DataError, match="logical shard 0 came to its end; let"):
        world.next()
    # Shard 0 may be ahead of the position now.
    for step in (world.next, world.save):
        with pytest.raises(errors.DataError, match="stopped in the middle of a batch"):
            step()
    world.load(before)
    assert world.save() == before


def test_data_travels_to_a_sidecar_by_cloudpickle():
    data = make("everything")
    copy = cloudpickle.loads(cloudpickle.dumps(data))
    assert World(copy, 2, 12).next() == World(data, 1, 12).next()


class TestShardedBatches(iterator_contract.IteratorContract):
    @pytest.fixture
    def data(self):
        return make("everything", num_shards=8)

    def other(self, _):
        return make("plain", num_shards=8), 'pipeline: saved "everything", now "plain"'
