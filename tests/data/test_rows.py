import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import rows

SHARDS = st.integers(1, 24)
SIZES = st.integers(1, 48)
POSITIONS = st.integers(0, 500)


def in_order(num_hosts, size):
    placement = rows.Placement.in_order(0, num_hosts=num_hosts, global_batch_size=size)
    return placement.row_hosts


@st.composite
def assignments(draw):
    """S, B, a number of hosts that divides B, and a position."""
    size = draw(SIZES)
    num_hosts = draw(st.sampled_from([h for h in range(1, size + 1) if size % h == 0]))
    batch = rows.BatchRows(num_shards=draw(SHARDS), global_batch_size=size)
    return batch, num_hosts, draw(POSITIONS)


def assign(batch, num_hosts, position):
    try:
        row_hosts = in_order(num_hosts, batch.global_batch_size)
        return rows.assign(batch, row_hosts, position)
    except errors.ConfigError:
        return None


@given(SHARDS, st.lists(SIZES, max_size=8))
def test_any_schedule_of_batch_sizes_yields_the_stream_once_and_in_order(shards, sizes):
    position, yielded = 0, collections.Counter()
    for size in sizes:
        batch = rows.BatchRows(num_shards=shards, global_batch_size=size)
        yields = []
        for shard in batch.shards(position).tolist():
            yields.append((shard, yielded[shard]))
            yielded[shard] += 1
        stream = [(g % shards, g // shards) for g in range(position, position + size)]
        assert sorted(yields) == sorted(stream)
        position += size
        counts = [yielded[shard] for shard in range(shards)]
        assert rows.emitted(position, shards).tolist() == counts


@given(assignments())
def test_rows_and_shards_are_shared_out_without_rest_or_overlap(given_):
    batch, num_hosts, _ = given_
    hosts = assign(*given_)
    assume(hosts is not None)
    assert len(hosts) == num_hosts
    loaded = np.concatenate([host.rows for host in hosts])
    assert sorted(loaded) == list(range(batch.global_batch_size))
    assert {len(host.rows) for host in hosts} == {batch.global_batch_size // num_hosts}
    shards = np.concatenate([host.shards for host in hosts])
    assert sorted(shards) == list(range(batch.num_shards))


@given(assignments())
def test_a_host_needs_no_shard_of_another_at_any_later_step(given_):
    batch, _, position = given_
    hosts = assign(*given_)
    assume(hosts is not None)
    for step in range(30):
        shards = batch.shards(position + step * batch.global_batch_size)
        for host in hosts:
            assert set(shards[host.rows]) <= set(host.shards)


@given(assignments())
def test_in_place_means_the_rows_that_the_devices_hold(given_):
    batch, num_hosts, _ = given_
    hosts = assign(*given_)
    assume(hosts is not None)
    row_hosts = in_order(num_hosts, batch.global_batch_size)
    for number, host in enumerate(hosts):
        in_place = host.rows.tolist() == np.flatnonzero(row_hosts == number).tolist()
        assert in_place or not host.in_place


@given(
    st.sets(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    POSITIONS,
)
def test_the_suggested_shards_keep_rows_in_place_everywhere(hosts, factors, position):
    least = math.lcm(*hosts)
    batches = [least * factor for factor in factors]
    suggested = rows.suggest_num_shards(sorted(hosts), batches)
    assert suggested == least
    for num_hosts, size in itertools.product(hosts, batches):
        batch = rows.BatchRows(num_shards=suggested, global_batch_size=size)
        assert all(host.in_place for host in assign(batch, num_hosts, position))


@given(st.sets(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 4), POSITIONS)
def test_the_suggested_shards_suit_a_batch_that_grows_with_the_hosts(
    hosts, rows_a_host, position
):
    batches = [num_hosts * rows_a_host for num_hosts in hosts]
    suggested = rows.suggest_num_shards(sorted(hosts), batches)
    for num_hosts, size in zip(hosts, batches, strict=True):
        batch = rows.BatchRows(num_shards=suggested, global_batch_size=size)
        assert all(host.in_place for host in assign(batch, num_hosts, position))


@pytest.mark.parametrize(
    ("num_shards", "size", "arrangement"),
    [(4, 12, "blocked"), (12, 12, "blocked"), (12, 4, "windowed"), (12, 8, "striped")],
)
def test_the_arrangement_depends_on_shards_and_rows_alone(
    num_shards, size, arrangement
):
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=size)
    assert batch.arrangement.value == arrangement


def test_rows_follow_a_sharding_that_gives_hosts_alternating_blocks():
    # Two slices of two hosts, whose blocks of rows the mesh lays out slice by slice.
    batch = rows.BatchRows(num_shards=4, global_batch_size=8)
    hosts = rows.assign(batch, np.array([0, 0, 1, 1, 0, 0, 1, 1]), 0)
    assert [host.shards.tolist() for host in hosts] == [[0, 2], [1, 3]]
    assert [host.rows.tolist() for host in hosts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert all(host.in_place for host in hosts)


def test_a_shard_whose_rows_lie_on_two_hosts_is_loaded_by_one_of_them():
    batch = rows.BatchRows(num_shards=2, global_batch_size=4)
    hosts = rows.assign(batch, np.array([0, 1, 0, 1]), 0)
    assert [host.rows.tolist() for host in hosts] == [[0, 1], [2, 3]]
    assert not any(host.in_place for host in hosts)


def test_hosts_that_fit_neither_shards_nor_batch_are_refused_with_what_would_fit():
    batch = rows.BatchRows(num_shards=4, global_batch_size=12)
    with pytest.raises(errors.ConfigError) as refused:
        rows.assign(batch, in_order(3, 12), 0)
    assert str(refused.value) == (
        "3 hosts cannot share 4 logical shards in batches of 12 rows: the hosts have to"
        " divide both; use a number of hosts that divides 4, or start a run with"
        " num_logical_shards=3"
    )
    with pytest.raises(errors.ConfigError, match="10 rows is divided by none of"):
        rows.suggest_num_shards([3, 4], [12, 10])


def test_a_plan_for_ten_thousand_hosts_needs_no_loop_over_records():
    batch = rows.BatchRows(num_shards=40_000, global_batch_size=20_000)
    hosts = rows.assign(batch, in_order(10_000, 20_000), 10**9)
    assert len(hosts) == 10_000
    assert {len(host.shards) for host in hosts} == {4}
