import collections
import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
    hosts = rows.assign(batch, row_hosts, position)
    assert len(hosts) == row_hosts.max() + 1
    for number, host in enumerate(hosts):
        assert host.rows.tolist() == np.flatnonzero(row_hosts == number).tolist()


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


@given(layouts(), POSITIONS, st.integers(0, 60))
def test_hosts_run_the_same_shards_until_the_batch_size_changes(layout, position, step):
    batch, row_hosts = layout
    now = rows.assign(batch, row_hosts, position)
    later = rows.assign(batch, row_hosts, position + step * batch.global_batch_size)
    for one, two in zip(now, later, strict=True):
        assert one.shards.tolist() == two.shards.tolist()
        assert one.writes.tolist() == two.writes.tolist()


def assert_nothing_is_discarded(batch, num_hosts, position):
    row_hosts = in_order(num_hosts, batch.global_batch_size)
    hosts = rows.assign(batch, row_hosts, position)
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
        assert_nothing_is_discarded(batch, num_hosts, position)


def test_hosts_that_do_not_fit_the_shards_read_some_twice():
    batch = rows.BatchRows(num_shards=4, global_batch_size=12)
    # Of shards that have three rows each, the hosts hold rows 0-3, 4-7 and 8-11.
    hosts = rows.assign(batch, in_order(3, 12), 0)
    assert [host.shards.tolist() for host in hosts] == [[0, 1], [1, 2], [2, 3]]
    assert [host.writes.tolist() for host in hosts] == [[0, 1], [2], [3]]
