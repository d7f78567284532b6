import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import plan, rows

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
def test_every_row_is_loaded_by_the_host_that_is_to_load_it(layout, position):
    batch, row_hosts = layout
    for loads in (row_hosts, rows.loaders(batch, row_hosts)):
        hosts = rows.assign(batch, loads, position)
        assert len(hosts) == loads.max() + 1
        for number, host in enumerate(hosts):
            assert host.rows.tolist() == np.flatnonzero(loads == number).tolist()


@given(layouts(), POSITIONS)
def test_each_shard_runs_on_one_host_and_as_many_as_divide_it_up_load(layout, position):
    batch, row_hosts = layout
    loads = rows.loaders(batch, row_hosts)
    hosts = rows.assign(batch, loads, position)
    run = np.concatenate([host.shards for host in hosts])
    assert sorted(run) == list(range(batch.num_shards))
    assert len({len(host.rows) for host in hosts}) == 1
    in_place = rows.assign(batch, row_hosts, position)
    if sum(len(host.shards) for host in in_place) == batch.num_shards:
        assert loads is row_hosts
    else:
        divided = math.gcd(batch.num_shards, batch.global_batch_size)
        fitting = [h for h in range(1, len(in_place) + 1) if divided % h == 0]
        assert len(hosts) == fitting[-1]


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


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_hosts_that_divide_the_shards_load_what_they_hold_in_order(
    num_hosts, shards_a_host, rows_a_shard
):
    num_shards = num_hosts * shards_a_host
    size = num_shards * rows_a_shard
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=size)
    row_hosts = in_order(num_hosts, size)
    assert rows.loaders(batch, row_hosts) is row_hosts


@given(layouts(), POSITIONS, st.integers(0, 60))
def test_hosts_run_the_same_shards_until_the_batch_size_changes(layout, position, step):
    batch, row_hosts = layout
    row_hosts = rows.loaders(batch, row_hosts) if step % 2 else row_hosts
    now = rows.assign(batch, row_hosts, position)
    later = rows.assign(batch, row_hosts, position + step * batch.global_batch_size)
    for one, two in zip(now, later, strict=True):
        assert one.shards.tolist() == two.shards.tolist()
        assert one.writes.tolist() == two.writes.tolist()


def assert_nothing_is_moved_or_discarded(batch, num_hosts, position):
    row_hosts = in_order(num_hosts, batch.global_batch_size)
    hosts = rows.assign(batch, row_hosts, position)
    assert rows.loaders(batch, row_hosts) is row_hosts
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


def test_of_hosts_that_do_not_fit_the_shards_fewer_load():
    batch = rows.BatchRows(num_shards=4, global_batch_size=12)
    # Of shards that have three rows each, the hosts hold rows 0-3, 4-7 and 8-11.
    row_hosts = in_order(3, 12)
    hosts = rows.assign(batch, row_hosts, 0)
    assert [host.shards.tolist() for host in hosts] == [[0, 1], [1, 2], [2, 3]]
    assert [host.writes.tolist() for host in hosts] == [[0, 1], [2], [3]]
    hosts = rows.assign(batch, rows.loaders(batch, row_hosts), 0)
    assert [host.shards.tolist() for host in hosts] == [[0, 1], [2, 3]]
    assert [host.rows.tolist() for host in hosts] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize(
    ("num_shards", "size", "of_host"),
    [
        (40_000, 30_000, 4),  # striped, and handed on
        (6_000, 60_000, 1),  # blocked, of which 6,000 hosts load
    ],
)
def test_ten_thousand_hosts_share_out_every_row_and_shard(num_shards, size, of_host):
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=size)
    loads = rows.loaders(batch, in_order(10_000, size))
    hosts = rows.assign(batch, loads, 10**9)
    loaded = np.concatenate([host.rows for host in hosts])
    np.testing.assert_array_equal(np.sort(loaded), np.arange(size))
    assert max(len(host.shards) for host in hosts) == of_host
    for each in ("shards", "writes"):
        of_all = np.sort(np.concatenate([getattr(host, each) for host in hosts]))
        np.testing.assert_array_equal(of_all, np.arange(num_shards))


def test_hosts_that_fit_read_their_own_shards_and_move_nothing():
    outlook = plan.outlook(12, 3, 24)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 3)
    assert outlook.host_shards == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert (outlook.moved_rows, outlook.host_rows) == (0, 8)


def test_of_hosts_that_fit_neither_way_as_many_as_fit_load():
    outlook = plan.outlook(4, 3, 12, row_bytes=10)
    assert (outlook.arrangement, outlook.loading_hosts) == ("blocked", 2)
    assert outlook.host_shards == ((0, 1), (2, 3))
    # Rows 4 and 5 come from host 0, and rows 8 to 11 from host 1; rows 6 and 7 stay.
    assert (outlook.moved_rows, outlook.host_rows) == (6, 6)
    assert outlook.moved_bytes == 60


def test_every_combination_is_there():
    outlook = plan.outlooks(12, [1, 4], [12, 24, 36])
    assert [(o.num_hosts, o.global_batch_size) for o in outlook] == [
        (h, size) for h in (1, 4) for size in (12, 24, 36)
    ]
