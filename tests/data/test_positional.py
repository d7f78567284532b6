import collections
import dataclasses
import itertools

import cloudpickle
import pytest

from elastic_ckpt.data import example_id, rows
from tests import worlds

GLOBAL_BATCH_SIZE = 12
NUM_BATCHES = 18  # of 12 rows: more than two epochs of 100 examples


def world(data, num_hosts):
    return [
        data.host_batches(
            rows.Placement.in_order(
                host, num_hosts=num_hosts, global_batch_size=GLOBAL_BATCH_SIZE
            )
        )
        for host in range(num_hosts)
    ]


def next_rows(hosts):
    """The rows of the next global batch, as sorted (id, inputs, targets)."""
    parts = [next(host) for host in hosts]
    actual = [
        (id_, inputs.tobytes(), targets.tobytes())
        for part in parts
        for id_, inputs, targets in zip(
            example_id.join(part["example_id"]),
            part["inputs"],
            part["targets"],
            strict=True,
        )
    ]
    assert len(actual) == GLOBAL_BATCH_SIZE
    return sorted(actual)


@pytest.fixture(params=[True, False], ids=["in place", "by Grain"])
def data(request, data):
    return dataclasses.replace(data, in_place=request.param)


@pytest.fixture
def oracle(data):
    one = world(data, 1)
    return [next_rows(one) for _ in range(NUM_BATCHES)]


def test_the_state_before_every_batch_continues_on_any_other_number_of_hosts(
    data, oracle
):
    counts = itertools.cycle([4, 3, 1, 6, 2, 12])
    hosts = world(data, next(counts))
    for batch in oracle:
        saved = hosts[-1].position()
        hosts = world(data, next(counts))
        for host in hosts:
            host.go_to(saved, read=None)
        assert next_rows(hosts) == batch


def in_order(hosts):
    """The ids of the next global batch, as the hosts' devices hold them."""
    return [id_ for host in hosts for id_ in example_id.join(next(host)["example_id"])]


@pytest.mark.parametrize("num_hosts", [3, 12])
def test_in_place_every_row_stands_where_it_stands_on_one_host(data, num_hosts):
    one, hosts = world(data, 1), world(data, num_hosts)
    for _ in range(NUM_BATCHES):
        ours, theirs = in_order(hosts), in_order(one)
        assert sorted(ours) == sorted(theirs)
        # With one row a host there is but one way.
        assert (ours == theirs) == (data.in_place or num_hosts == GLOBAL_BATCH_SIZE)


def test_each_epoch_uses_each_example_once_in_an_order_of_its_own(data):
    (host,) = world(data, 1)
    ids = []
    while len(ids) < 300:
        ids += example_id.join(next(host)["example_id"])
    epochs = [ids[start : start + 100] for start in (0, 100, 200)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def finite(data):
    return dataclasses.replace(data, num_epochs=2)


def ids_of(batches):
    return [
        id_
        for batch in batches
        for id_ in example_id.join(batch["example_id"])
        if id_ != example_id.NONE
    ]


@pytest.mark.parametrize("num_hosts", [4])
def test_two_epochs_have_each_example_twice_and_padding_that_is_masked(data, num_hosts):
    data = finite(data)
    batches = worlds.World(data, num_hosts, 12).rest()
    assert collections.Counter(ids_of(batches)) == dict.fromkeys(range(100), 2)
    assert [int(batch["mask"].sum()) for batch in batches] == [12] * 16 + [8]
    is_padding = ~batches[-1]["mask"]
    padding = {name: feature[is_padding] for name, feature in batches[-1].items()}
    assert set(example_id.join(padding.pop("example_id"))) == {example_id.NONE}
    assert not any(feature.any() for feature in padding.values())


def test_the_state_before_every_batch_of_finite_data_can_be_returned_to(data):
    data = finite(data)
    expected = worlds.World(data, 3, 12).rest()
    world, states = worlds.World(data, 3, 12), []
    for _ in expected:
        states.append(world.save())
        world.batch()
    states.append(world.save())
    for number, saved in enumerate(states):
        resumed = worlds.World(data, 3, 12)
        resumed.load(saved)
        # All of them in turn, and the end from near it.
        actual = resumed.rest() if number > 14 else [resumed.batch()]
        later = expected[number:] if number > 14 else [expected[number]]
        assert list(map(worlds.content, actual)) == list(map(worlds.content, later))


def test_endless_data_has_no_mask_and_travels_to_a_sidecar_by_cloudpickle(data):
    copy = cloudpickle.loads(cloudpickle.dumps(data))
    assert "mask" not in worlds.World(data, 1, 12).batch()
    assert next_rows(world(copy, 1)) == next_rows(world(data, 1))
