import dataclasses
import re
import threading
from concurrent import futures

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import allgather, errors, topology
from elastic_ckpt.data import (
    cursors,
    delivery,
    iterator,
    sharded_data,
    stages,
    state,
)
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


def sharding_of(hosts, spec=("data",)):
    """A sharding over the devices of hosts; `hosts` has the host of each device."""
    numbers = np.array(hosts)
    devices = [Device(int(host), n) for n, host in enumerate(numbers.flat)]
    mesh = Mesh(
        np.array(devices).reshape(numbers.shape), ("data", "tensor")[: numbers.ndim]
    )
    return NamedSharding(mesh, PartitionSpec(*spec))


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


def numbers(shard, *, length=None):
    """Endless examples of a shard, or so many."""
    examples = grain.MapDataset.range(10**6 if length is None else length)
    return examples.map(
        lambda n: {"x": np.array([shard, n + 1], np.int32)}
    ).to_iter_dataset(pipelines.IN_CALLER)


@pytest.fixture
def as_host(monkeypatch):
    """Makes this process that host of a world."""

    def take_part(number):
        monkeypatch.setattr(topology, "this_host", lambda: number)

    return take_part


def world_of_twelve_shards(as_host, directory, num_hosts, size):
    """Hosts that have taken a batch, and a function that has each make a call."""
    data = sharded_data.sharded(numbers, num_shards=12, pipeline="numbers")
    world = worlds.World(data, num_hosts, size)
    world.batch()
    world.write(directory)
    sharding = sharding_of(range(num_hosts))
    hosts = [
        iterator.HostIterator(data, sharding=sharding, global_batch_size=size)
        for _ in range(num_hosts)
    ]

    def on_each(call):
        results = []
        for number, host in enumerate(hosts):
            as_host(number)
            results.append(call(host))
        return results

    on_each(lambda host: host.load(directory, state.read(directory)))
    return hosts, on_each


@pytest.fixture
def saved_by(tmp_path_factory):
    """The state that hosts save, in which each shard is in one file."""

    def saved(on_each):
        directory = tmp_path_factory.mktemp("saved")
        for write in on_each(lambda host: host.take(progress=None, left_out=())):
            write(directory)
        names = [path.stem for path in directory.glob("shards-*")]
        of_files = [tuple(map(int, re.findall(r"\d+", name))) for name in names]
        assert sum(last + 1 - first for first, last in of_files) == 12
        position = state.read(directory).position
        return position, cursors.read(directory, range(12), position)

    return saved


@pytest.mark.parametrize(
    ("num_hosts", "sizes"), [(3, (12, 18, 6, 24)), (4, (12, 8, 24, 4, 16))]
)
def test_hosts_that_divide_shards_and_rows_keep_their_shards_in_any_size(
    as_host, saved_by, tmp_path, num_hosts, sizes
):
    _, on_each = world_of_twelve_shards(as_host, tmp_path, num_hosts, sizes[0])
    before = saved_by(on_each)
    for size in sizes[1:]:
        on_each(lambda host, size=size: host.go_on(host.course.resized(size)))
        assert saved_by(on_each) == before


def test_a_size_that_moves_shards_is_refused_on_all_hosts_and_changes_nothing(
    as_host, saved_by, tmp_path
):
    hosts, on_each = world_of_twelve_shards(as_host, tmp_path, 5, 60)
    before = on_each(lambda host: host.get_state())
    # Some shards run on two hosts, and one of them saves each.
    assert sum(len(held) for _, held in before) > 12
    saved = saved_by(on_each)
    on_each(lambda host: host.reset())
    states = iter(before)
    on_each(lambda host: host.set_state(next(states)))
    for number, host in enumerate(hosts):
        as_host(number)
        with pytest.raises(
            errors.ConfigError,
            match=r"of 10 rows logical shards \[.*\] move to host 0, which",
        ):
            host.go_on(host.course.resized(10))
    assert on_each(lambda host: host.get_state()) == before
    assert on_each(lambda host: host.course.size) == [60] * 5
    # After a load all cursors can be read, and at the beginning there are none.
    for begin, expected in (
        (lambda host: host.load(tmp_path, state.read(tmp_path)), saved),
        (lambda host: host.reset(), ({"batches": []}, dict.fromkeys(range(12)))),
    ):
        on_each(begin)
        on_each(lambda host: host.go_on(host.course.resized(10)))
        assert saved_by(on_each) == expected


@pytest.mark.parametrize(
    ("taken", "sizes"), [((3, 3), (16, 36)), ((3, 4), (16, 16)), ((3, 3), (8, 8))]
)
def test_hosts_that_change_differently_are_both_told(monkeypatch, taken, sizes):
    data = sharded_data.sharded(numbers, num_shards=12, pipeline="numbers")
    store, me = thread_store.Store(), threading.local()

    def shared(_):
        return allgather.Allgather(store, "", host=me.host, num_hosts=2)

    def problem(host):
        me.host = host
        course = stages.Course.first(data, sizes[host])
        try:
            iterator.check_alike(sharding_of(range(2)), course, taken[host])
        except errors.ConfigError as error:
            return str(error)
        return ""

    monkeypatch.setattr(topology, "this_host", lambda: me.host)
    monkeypatch.setattr(allgather, "shared", shared)
    with futures.ThreadPoolExecutor(2) as threads:
        told = list(threads.map(problem, range(2)))
    own = [f"in batches of {sizes[n]} rows, {taken[n]} batches after" for n in range(2)]
    for n in range(2):
        begin = f"host {n} is to continue {own[n]} the last change, but host {1 - n} in"
        assert told[n].startswith(begin if own[0] != own[1] else "")
        assert bool(told[n]) == (own[0] != own[1])


def batches_of(data, size):
    return iterator.Batches(
        data, mesh=topology.mesh_of(topology.present(2)), global_batch_size=size
    )


def test_a_number_that_jax_would_cut_is_an_error():
    value = -(2**31) - 1

    def make_shard(shard):
        numbers = grain.MapDataset.range(100)
        rows = numbers.map(lambda n: {"x": np.array(value if n > 4 else n + shard)})
        return rows.to_iter_dataset(pipelines.IN_CALLER)

    data = sharded_data.sharded(make_shard, num_shards=2, pipeline="mine")
    batches = batches_of(data, 8)
    first = next(batches)["x"]
    assert first.dtype == np.int32
    assert sorted(np.asarray(first).tolist()) == [0, 1, 1, 2, 2, 3, 3, 4]
    with pytest.raises(
        errors.DataError,
        match=f"feature 'x' has the value {value}, but JAX would convert it to int32",
    ):
        next(batches)
    batches.close()
    assert not jax.config.jax_enable_x64


def ending(num_shards, lengths, size=8):
    def make_shard(shard):
        return numbers(shard, length=lengths[shard % len(lengths)])

    return batches_of(
        sharded_data.sharded(
            make_shard, num_shards=num_shards, pipeline="numbers", end="padded"
        ),
        size,
    )


def test_padded_data_ends_when_every_shard_has_given_its_last_row():
    batches = ending(16, (7, 0, 0, 0))
    delivered = list(batches)
    assert [int(np.sum(batch["mask"])) for batch in delivered] == [4] * 7
    # It stays at its end, until it begins again.
    assert list(batches) == []
    batches.reset()
    assert len(list(batches)) == len(delivered)


def test_data_without_a_row_says_so():
    with pytest.raises(
        errors.DataError, match="none of the 8 logical shards has an ex"
    ):
        next(ending(8, (0,)))
