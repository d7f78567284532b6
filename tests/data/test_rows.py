import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data import rows

SHARDS = st.integers(1, 24)
SIZES = st.integers(1, 48)
HISTORIES = st.lists(st.tuples(SIZES, st.integers(1, 30)), max_size=6)


@st.composite
def layouts(draw):
    """S, B, and the rows of hosts: in order, in blocks that alternate, or anyhow."""
    size = draw(SIZES)
    divisors = st.sampled_from([n for n in range(1, size + 1) if size % n == 0])
    num_hosts, block = draw(divisors), draw(divisors)
    row_hosts = np.arange(size) // block % num_hosts
    if draw(st.booleans()):
        row_hosts = np.array(draw(st.permutations(row_hosts.tolist())))
    held = {host: np.flatnonzero(row_hosts == host) for host in range(num_hosts)}
    return draw(SHARDS), size, held


@given(SHARDS, HISTORIES)
def test_any_history_counts_the_rows_that_each_shard_has_yielded(shards, periods):
    history, yielded = (), collections.Counter()
    for size, batches in periods:
        for _ in range(batches):
            number = rows.batches_of(history, size)
            of_rows = rows.batch_shards(shards, size, number)
            assert len(of_rows) == size
            yielded.update(of_rows.tolist())
            history = rows.after(history, size)
        counts = [yielded[shard] for shard in range(shards)]
        assert rows.emitted(shards, history).tolist() == counts
        assert rows.num_rows(history) == sum(counts)


@given(layouts(), st.integers(0, 3), st.integers(1, 5))
def test_a_host_runs_the_shards_that_it_needs_and_saves_those_that_none_before_runs(
    layout, first, every
):
    num_shards, size, held = layout
    saves = rows.shard_hosts(num_shards, size, held)
    runs = {h: rows.host_shards(num_shards, size, held[h]).tolist() for h in held}
    assert saves.tolist() == [
        min(host for host in held if shard in runs[host]) for shard in range(num_shards)
    ]
    for own in held.values():
        needed = set()
        # After S of its batches everything begins again.
        for number in range(first, first + every * num_shards, every):
            shards = rows.batch_shards(num_shards, size, number)
            needed.update(shards[own].tolist())
        run = rows.host_shards(num_shards, size, own, every=every, first=first)
        assert run.tolist() == sorted(needed)


@pytest.mark.parametrize(("num_hosts", "reads"), [(4, 1), (3, 1.125)])
def test_hosts_that_do_not_divide_the_shards_read_some_twice(num_hosts, reads):
    placements = rows.in_order(num_hosts, 48)
    # Hosts with the same rows count as one.
    for each in (placements, placements * 2):
        assert rows.shard_reads(64, each) == reads


def test_a_host_runs_the_shards_of_all_sizes_that_may_come():
    for later, shards in (((9, 12), [0, 1, 2, 3]), ((), [1, 2])):
        placement = rows.in_order(3, 12, later=later)[1]
        assert placement.shards(4).tolist() == shards


def test_as_many_shards_are_suggested_as_every_number_of_hosts_divides():
    assert rows.suggest_num_shards([2, 3, 4], [24]) == 12
    with pytest.raises(errors.ConfigError, match=r"\[4, 6\] divides the batch size 9"):
        rows.suggest_num_shards([4, 6], [12, 9])
