import contextlib
import dataclasses
import re
import shutil
import threading
from concurrent import futures

import grain
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import allgather, errors, topology
from elastic_ckpt.data import cursors, delivery, iterator, sharded_data, stages, state
from tests import iterator_contract, pipelines, worlds
from tests.core import thread_store


class TestBatches(iterator_contract.IteratorContract):
    """In this process."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of some host."""

    process_index: int
    number: int
    device_kind: str = "cpu"
    platform: str = "cpu"


def sharding_of(hosts):
    """A sharding over the devices of hosts; `hosts` has the host of each device."""
    numbers = np.array(hosts)
    devices = [Device(int(host), n) for n, host in enumerate(numbers.flat)]
    axes = ("data", "tensor")[: numbers.ndim]
    mesh = Mesh(np.array(devices).reshape(numbers.shape), axes)
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.mark.parametrize(
    ("hosts", "rows", "saves"),
    [
        (
            [[1, 3], [1, 3], [0, 2], [0, 2]],
            {0: (4, 8), 1: (0, 4), 2: (4, 8), 3: (0, 4)},
            [1, 1, 0, 0],
        ),
        # Rows of hosts overlap.
        ([[0, 0, 1], [1, 2, 2]], {0: (0, 4), 1: (0, 8), 2: (4, 8)}, [0, 0, 1, 1]),
    ],
)
def test_hosts_load_the_rows_of_their_devices(hosts, rows, saves):
    placements = delivery.placements(sharding_of(hosts), 8)
    assert {host: each.held.tolist() for host, each in placements.items()} == {
        host: [*range(*held)] for host, held in rows.items()
    }
    assert delivery.saved_shards(sharding_of(hosts), 8, 4).tolist() == saves


@pytest.fixture
def hosts_of(monkeypatch, tmp_path_factory):
    """Makes hosts of twelve shards that have taken a batch."""

    def made(num_hosts, size):
        data = pipelines.sharded("plain")
        world = worlds.World(data, num_hosts, size)
        world.batch()
        sharding = sharding_of(range(num_hosts))
        hosts = [
            iterator.HostIterator(data, sharding=sharding, global_batch_size=size)
            for _ in range(num_hosts)
        ]

        def on_each(call):
            results = []
            for number, host in enumerate(hosts):
                monkeypatch.setattr(topology, "this_host", lambda number=number: number)
                results.append(call(host))
            return results

        def load():
            directory = tmp_path_factory.mktemp("loaded")
            world.write(directory)
            on_each(lambda host: host.load(directory, state.read(directory)))
            return directory

        def saved():
            to = tmp_path_factory.mktemp("saved")
            for write in on_each(lambda host: host.take(progress=None, left_out=())):
                write(to)
            names = [re.findall(r"\d+", path.stem) for path in to.glob("shards-*")]
            # Each shard is in one file.
            assert sum(int(last) + 1 - int(first) for first, last in names) == 12
            position = state.read(to).position
            return position, cursors.read(to, range(12), position)

        load()
        states = iter(on_each(lambda host: host.get_state()))
        # Otherwise the cursors of all shards could be read.
        on_each(lambda host: host.reset())
        on_each(lambda host: host.set_state(next(states)))
        return on_each, load, saved

    return made


def resize(size):
    return lambda host: host.continue_with(host.course.resized(size))


def test_hosts_that_divide_shards_and_rows_keep_their_shards_in_any_size(hosts_of):
    on_each, load, saved = hosts_of(4, 12)
    before = saved()
    for size in (8, 24, 4, 16):
        on_each(resize(size))
        assert saved() == before
    # Nor does a host read its own cursors again.
    shutil.rmtree(load())
    on_each(resize(8))
    assert saved() == before


def test_a_size_that_moves_shards_is_refused_on_all_hosts_and_changes_nothing(hosts_of):
    on_each, load, saved = hosts_of(5, 60)
    before, as_saved = on_each(lambda host: host.get_state()), saved()
    # Some shards run on two hosts, and one of them saves each.
    assert sum(len(held) for _, held in before) > 12

    def refuse(host):
        with pytest.raises(
            errors.ConfigError, match=r"of 10 .*\] would move to host 0, which"
        ):
            resize(10)(host)
        return host.course.size

    assert on_each(refuse) == [60] * 5
    assert on_each(lambda host: host.get_state()) == before
    # After a load all cursors can be read, and at the beginning there are none.
    load()
    on_each(resize(10))
    assert saved() == as_saved
    on_each(lambda host: host.reset())
    on_each(resize(10))
    assert saved() == ({"batches": []}, dict.fromkeys(range(12)))


# The size of the batches of each of two hosts, and how many it has taken.
@pytest.mark.parametrize(
    "hosts", [((16, 3), (36, 3)), ((16, 3), (16, 4)), ((8, 3), (8, 3))]
)
def test_hosts_that_change_differently_are_both_told(monkeypatch, hosts):
    store, me = thread_store.Store(), threading.local()

    def check(host):
        me.host = host
        own, other = (
            f"in batches of {size} rows, {taken} batches after the last change"
            for size, taken in (hosts[host], hosts[1 - host])
        )
        says = f"host {host} would continue {own}, but host {1 - host} would .*{other};"
        refused = pytest.raises(errors.ConfigError, match=says)
        size, taken = hosts[host]
        course = stages.Course(data=None, base_size=size)
        with refused if own != other else contextlib.nullcontext():
            iterator.check_alike(sharding_of(range(2)), course, taken)

    def shared(_):
        return allgather.Allgather(store, "", host=me.host, num_hosts=2)

    monkeypatch.setattr(topology, "this_host", lambda: me.host)
    monkeypatch.setattr(allgather, "shared", shared)
    with futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(check, range(2)))


def ending(num_shards, lengths):
    def make_shard(shard):
        numbers = grain.MapDataset.range(lengths[shard % len(lengths)])
        rows = numbers.map(lambda n: {"x": np.array([shard, n + 1])})
        return rows.to_iter_dataset(pipelines.IN_CALLER)

    data = sharded_data.sharded(
        make_shard, num_shards=num_shards, pipeline="numbers", end="padded"
    )
    mesh = topology.mesh_of(topology.present(2))
    return iterator.Batches(data, mesh=mesh, global_batch_size=8)


def test_padded_data_ends_when_every_shard_has_given_its_last_row():
    batches = ending(16, (7, 0, 0, 0))
    # It stays at its end, until it begins again.
    for is_again in (False, True, False):
        delivered = [int(np.sum(batch["mask"])) for batch in batches]
        assert delivered == ([] if is_again else [4] * 7)
        if is_again:
            batches.reset()
    with pytest.raises(errors.DataError, match="none of the 8 logical shards has an"):
        next(ending(8, (0,)))
