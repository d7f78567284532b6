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
def layouts(draw):
    """S, B, and a host for each row: in order, in blocks that alternate, or anyhow."""
    size = draw(SIZES)
    num_hosts = draw(st.sampled_from([h for h in range(1, size + 1) if size % h == 0]))
    rows_a_host = size // num_hosts
    block = draw(
        st.sampled_from([n for n in range(1, size + 1) if rows_a_host % n == 0])
    )
    row_hosts = np.repeat(np.arange(num_hosts), block)
    row_hosts = np.tile(row_hosts, rows_a_host // block)
    if draw(st.booleans()):
        row_hosts = np.array(draw(st.permutations(row_hosts.tolist())))
    return rows.BatchRows(num_shards=draw(SHARDS), global_batch_size=size), row_hosts


def as_loaded(hosts, row_hosts):
    """The number of the row that stands in each row's place before the exchange."""
    loaded = np.full(len(row_hosts), -1)
    for number, host in enumerate(hosts):
        loaded[row_hosts == number] = host.rows
    return loaded


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


@given(layouts(), POSITIONS)
def test_every_row_is_loaded_once_and_where_it_is_held_but_for_an_exchange(
    layout, position
):
    batch, row_hosts = layout
    hosts = rows.assign(batch, row_hosts, position)
    num_hosts, in_place = len(hosts), rows.exchanged(*layout) is None
    assert num_hosts == row_hosts.max() + 1
    for number, host in enumerate(hosts):
        held = np.flatnonzero(row_hosts == number).tolist()
        every_nth = list(range(number, len(row_hosts), num_hosts))
        assert host.rows.tolist() == (held if in_place else every_nth)
    loaded = np.concatenate([host.rows for host in hosts])
    assert sorted(loaded) == list(range(len(row_hosts)))


@given(layouts())
def test_rows_are_exchanged_if_hosts_fit_the_shards_alone(layout):
    batch, row_hosts = layout
    num_hosts = row_hosts.max() + 1
    fits = batch.arrangement is rows.Arrangement.STRIPED
    fits = fits and batch.num_shards % num_hosts == 0 and num_hosts > 1
    assert (rows.exchanged(*layout) is not None) == fits


@given(layouts(), POSITIONS)
def test_the_exchange_restores_the_order_of_the_batch(layout, position):
    loaded = as_loaded(rows.assign(*layout, position), layout[1])
    order = rows.exchanged(*layout)
    restored = loaded if order is None else loaded[order]
    assert restored.tolist() == list(range(len(loaded)))


@given(layouts(), POSITIONS)
def test_every_shard_is_written_by_one_host_that_runs_it(layout, position):
    batch, _ = layout
    hosts = rows.assign(*layout, position)
    assert all(set(host.writes) <= set(host.shards) for host in hosts)
    written = np.concatenate([host.writes for host in hosts])
    assert sorted(written) == list(range(batch.num_shards))


@given(layouts(), POSITIONS)
def test_a_host_runs_the_shards_that_it_needs_now_or_later_and_no_others(
    layout, position
):
    batch, _ = layout
    hosts = rows.assign(*layout, position)
    needed = [set() for _ in hosts]
    # After S batches everything begins again.
    for step in range(batch.num_shards):
        shards = batch.shards(position + step * batch.global_batch_size)
        for host, of_host in zip(hosts, needed, strict=True):
            of_host.update(shards[host.rows].tolist())
    assert [host.shards.tolist() for host in hosts] == list(map(sorted, needed))


@given(layouts(), POSITIONS)
def test_no_shard_runs_twice_where_hosts_fit(layout, position):
    batch, row_hosts = layout
    hosts = rows.assign(*layout, position)
    blocked = batch.arrangement is rows.Arrangement.BLOCKED
    in_order = (np.diff(row_hosts) >= 0).all()
    assume(not blocked or (in_order and batch.num_shards % len(hosts) == 0))
    striped = batch.arrangement is rows.Arrangement.STRIPED
    assume(not striped or batch.num_shards % len(hosts) == 0)
    assert sum(len(host.shards) for host in hosts) == batch.num_shards
    assert all(host.writes.tolist() == host.shards.tolist() for host in hosts)


@given(layouts(), POSITIONS, st.integers(0, 60))
def test_hosts_run_the_same_shards_until_the_batch_size_changes(layout, position, step):
    batch, _ = layout
    now = rows.assign(*layout, position)
    later = rows.assign(*layout, position + step * batch.global_batch_size)
    for one, two in zip(now, later, strict=True):
        assert one.shards.tolist() == two.shards.tolist()
        assert one.writes.tolist() == two.writes.tolist()


def assert_nothing_is_moved_or_discarded(batch, num_hosts, position):
    row_hosts = in_order(num_hosts, batch.global_batch_size)
    hosts = rows.assign(batch, row_hosts, position)
    assert rows.exchanged(batch, row_hosts) is None
    assert sum(len(host.shards) for host in hosts) == batch.num_shards


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
        assert_nothing_is_moved_or_discarded(batch, num_hosts, position)


@given(st.sets(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 4), POSITIONS)
def test_the_suggested_shards_suit_a_batch_that_grows_with_the_hosts(
    hosts, rows_a_host, position
):
    batches = [num_hosts * rows_a_host for num_hosts in hosts]
    suggested = rows.suggest_num_shards(sorted(hosts), batches)
    for num_hosts, size in zip(hosts, batches, strict=True):
        batch = rows.BatchRows(num_shards=suggested, global_batch_size=size)
        assert_nothing_is_moved_or_discarded(batch, num_hosts, position)


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
    row_hosts = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    hosts = rows.assign(batch, row_hosts, 0)
    assert [host.shards.tolist() for host in hosts] == [[0, 2], [1, 3]]
    assert [host.rows.tolist() for host in hosts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows.exchanged(batch, row_hosts) is None


def test_a_shard_whose_rows_lie_on_two_hosts_runs_on_both_and_the_first_saves_it():
    batch = rows.BatchRows(num_shards=2, global_batch_size=4)
    hosts = rows.assign(batch, np.array([0, 1, 0, 1]), 0)
    assert [host.rows.tolist() for host in hosts] == [[0, 2], [1, 3]]
    assert [host.shards.tolist() for host in hosts] == [[0, 1], [0, 1]]
    assert [host.writes.tolist() for host in hosts] == [[0, 1], []]


def test_hosts_that_fit_neither_shards_nor_batch_run_every_shard_that_they_hold():
    batch = rows.BatchRows(num_shards=4, global_batch_size=12)
    hosts = rows.assign(batch, in_order(3, 12), 0)
    # Rows 0 to 3, 4 to 7 and 8 to 11, of shards that have three rows each.
    assert [host.shards.tolist() for host in hosts] == [[0, 1], [1, 2], [2, 3]]
    assert [host.writes.tolist() for host in hosts] == [[0, 1], [2], [3]]


def test_batches_that_no_host_count_divides_have_no_suggestion():
    with pytest.raises(errors.ConfigError, match="divides a batch of 10 rows"):
        rows.suggest_num_shards([3, 4], [12, 10])


def test_rows_that_do_not_divide_over_hosts_are_refused():
    with pytest.raises(
        errors.ConfigError, match="10 rows cannot be divided evenly among 4 hosts;"
    ):
        in_order(4, 10)


@pytest.mark.parametrize(
    ("num_shards", "size", "of_host", "run"),
    [
        (40_000, 80_000, 4, 40_000),  # blocked
        (40_000, 20_000, 4, 40_000),  # windowed
        (40_000, 30_000, 4, 40_000),  # striped, and exchanged
        (6_000, 60_000, 2, 14_000),  # blocked, and 6 rows a host of 10 rows a shard
    ],
)
def test_ten_thousand_hosts_share_out_every_row_and_shard(
    num_shards, size, of_host, run
):
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=size)
    row_hosts = in_order(10_000, size)
    hosts = rows.assign(batch, row_hosts, 10**9)
    loaded, order = as_loaded(hosts, row_hosts), rows.exchanged(batch, row_hosts)
    restored = loaded if order is None else loaded[order]
    np.testing.assert_array_equal(restored, np.arange(size))
    assert max(len(host.shards) for host in hosts) == of_host
    assert sum(len(host.shards) for host in hosts) == run
    written = np.sort(np.concatenate([host.writes for host in hosts]))
    np.testing.assert_array_equal(written, np.arange(num_shards))
