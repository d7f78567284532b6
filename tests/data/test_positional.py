import collections
import dataclasses
import itertools
import shutil

import cloudpickle
import numpy as np
import pytest

from elastic_ckpt.core import topology
from elastic_ckpt.data import example_id, iterator, positional_data, rows
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


def test_the_position_of_either_way_continues_in_the_other(data, oracle):
    other = dataclasses.replace(data, in_place=not data.in_place)
    hosts = world(data, 3)
    for batch in oracle[:5]:
        assert next_rows(hosts) == batch
    others = world(other, 2)
    for host in others:
        host.go_to(hosts[0].position(), read=None)
    for batch in oracle[5:]:
        assert next_rows(others) == batch


def test_each_epoch_uses_each_example_once_in_an_order_of_its_own(data):
    (host,) = world(data, 1)
    ids = []
    while len(ids) < 300:
        ids += example_id.join(next(host)["example_id"])
    epochs = [ids[start : start + 100] for start in (0, 100, 200)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffling_the_order_is_that_of_the_file(corpus):
    data = positional_data.PositionalData(
        files=(corpus,), max_target_length=8, shuffle=False
    )
    (host,) = world(data, 1)
    assert example_id.join(next(host)["example_id"]) == list(range(GLOBAL_BATCH_SIZE))


def test_targets_are_the_inputs_one_token_later(data):
    batch = next(world(data, 1)[0])
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["inputs"].dtype == np.int32


def test_reading_threads_change_nothing(corpus, oracle):
    threaded = positional_data.PositionalData(
        files=(corpus,), max_target_length=16, shuffle_seed=7, num_threads=3
    )
    assert [next_rows(hosts) for hosts in [world(threaded, 2)] * 5] == oracle[:5]


def finite(data, *, drop_remainder):
    return dataclasses.replace(data, num_epochs=2, drop_remainder=drop_remainder)


def ids_of(batches):
    return [
        id_
        for batch in batches
        for id_ in example_id.join(batch["example_id"])
        if id_ != example_id.NONE
    ]


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_two_epochs_have_each_example_twice_and_padding_that_is_masked(data, num_hosts):
    data = finite(data, drop_remainder=False)
    batches = worlds.World(data, num_hosts, 12).rest()
    examples = collections.Counter(ids_of(batches))
    if data.in_place:
        assert examples == dict.fromkeys(range(100), 2)
        assert [int(batch["mask"].sum()) for batch in batches] == [12] * 16 + [8]
        padding = {name: feature[8:] for name, feature in batches[-1].items()}
        assert set(example_id.join(padding.pop("example_id"))) == {example_id.NONE}
        assert not any(feature.any() for feature in padding.values())
    else:
        # Grain leaves out the 8 rows that fill no batch.
        assert examples.total() == 192
        assert all(batch["mask"].all() for batch in batches)


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_what_fills_no_batch_can_be_left_out(data, num_hosts):
    oracle = finite(dataclasses.replace(data, in_place=True), drop_remainder=False)
    expected = ids_of(worlds.World(oracle, 1, 12).rest()[:16])
    batches = worlds.World(finite(data, drop_remainder=True), num_hosts, 12).rest()
    assert [len(batch["mask"]) for batch in batches] == [12] * 16
    assert all(batch["mask"].all() for batch in batches)
    actual = ids_of(batches)
    assert sorted(actual[:12]) == sorted(expected[:12])
    assert sorted(actual) == sorted(expected)


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_the_state_before_every_batch_of_finite_data_can_be_returned_to(
    data, drop_remainder
):
    data = finite(data, drop_remainder=drop_remainder)
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


def test_finite_data_ends_in_a_loop_as_it_says(data):
    data = finite(data, drop_remainder=False)
    batches = iterator.Batches(
        data, mesh=topology.mesh_of(topology.present(2)), global_batch_size=16
    )
    for _ in range(2):
        assert len(list(batches)) == 12 + data.in_place
        assert list(batches) == []
        batches.reset()
    batches.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlakyData(positional_data.PositionalData):
    """Data of which one record cannot be read at first."""

    error: BaseException

    def examples(self):
        tries = iter([True])

        def flaky(example):
            if example["example_id"][1] == 20 and next(tries, False):
                raise self.error
            return example

        return super().examples().map(flaky)


@pytest.mark.parametrize(
    ("error", "num_threads", "in_place", "depth"),
    [
        (OSError("busy"), 0, True, 0),
        (OSError("busy"), 4, False, 2),
        (KeyboardInterrupt(), 0, True, 2),
        (KeyboardInterrupt(), 0, False, 0),
    ],
)
def test_after_a_batch_that_was_broken_off_the_same_batch_is_read(
    corpus, error, num_threads, in_place, depth
):
    flaky = FlakyData(
        files=(corpus,),
        max_target_length=16,
        shuffle=False,
        in_place=in_place,
        num_threads=num_threads,
        error=error,
        # Not into the next epoch.
        prefetch_records=4,
    )
    one = worlds.World(flaky, 1, 8, read_ahead=depth)
    actual, failures = [], 0
    while len(actual) < 6:
        try:
            actual.append(example_id.join(one.batch()["example_id"]))
        except (OSError, KeyboardInterrupt):
            failures += 1
        assert one.save()[0] == {"global_next_index": 8 * len(actual)}
    one.close()
    assert failures == 1
    assert actual == [list(range(n, n + 8)) for n in range(0, 48, 8)]


def test_endless_data_has_no_mask_and_travels_to_a_sidecar_by_cloudpickle(data):
    copy = cloudpickle.loads(cloudpickle.dumps(data))
    assert "mask" not in worlds.World(data, 1, 12).batch()
    assert next_rows(world(copy, 1)) == next_rows(world(data, 1))


def test_the_identity_names_whatever_changes_the_examples(corpus, data):
    def differing(**changes):
        other = positional_data.PositionalData(
            **{
                "files": (corpus,),
                "max_target_length": 16,
                "shuffle_seed": 7,
                **changes,
            }
        )
        one, two = data.identity(), other.identity()
        return {key for key in one if one[key] != two[key]}

    assert differing() == set()
    assert differing(num_threads=9, prefetch_records=1) == set()
    assert differing(shuffle_seed=8) == {"data_shuffle_seed"}
    assert differing(max_target_length=17) == {"max_target_length"}
    assert differing(shuffle=False) == {"enable_data_shuffling"}
    copy = shutil.copy(corpus, f"{corpus}_2")
    assert differing(files=(corpus, copy)) == {"grain_train_files"}
