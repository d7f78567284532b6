import functools
import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import order as orders

keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3).map(tuple)


def order_of(sizes, num_shards, seed, *, chained=None, num_bytes=0):
    is_chained = np.zeros(len(sizes), bool) if chained is None else chained
    return orders.Order(
        np.array(sizes, np.int64),
        np.array(is_chained),
        num_bytes=num_bytes,
        num_shards=num_shards,
        seed=seed,
    )


def parts(order, shard, epoch):
    """The block and the rows of each part that a shard reads."""
    share, taken = order.share(shard, epoch), 0
    while taken < len(share):
        block, rows, following = order.part(epoch, share[taken:])
        yield block, list(rows), following
        taken += len(rows)


def test_the_orders_of_all_datasets_hold_few_permutations():
    held = []
    for seed in range(3):
        made = order_of([4096] * 250, 1, seed)
        held += [weakref.ref(made._rows(0, block)) for block in range(250)]
        held += [weakref.ref(made._rows(1, block)) for block in range(250)]
    alive = [rows for each in held if (rows := each()) is not None]
    assert sum(rows.nbytes for rows in alive) <= 8 * 2**20


def order(length, *key):
    return orders.permuted(np.arange(length), length=length, key=key).tolist()


def number_at(place, length, *key):
    return int(orders.permuted(np.array([place]), length=length, key=key)[0])


@given(st.integers(1, 400), keys)
def test_every_key_permutes_every_length(length, key):
    singly = [number_at(place, length, *key) for place in range(length)]
    assert order(length, *key) == singly
    assert sorted(singly) == list(range(length))


@given(st.integers(1, 2**62), keys, st.data())
def test_a_permutation_of_any_length_gives_two_places_two_numbers(length, key, data):
    asked = data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=20))
    actual = {number_at(place, length, *key) for place in asked}
    assert len(actual) == len(asked)
    assert all(0 <= number < length for number in actual)


def test_the_orders_of_saved_runs_stay_what_they_are():
    assert order(10, 0, 0) == [6, 5, 9, 3, 0, 2, 4, 1, 8, 7]
    assert order(10, 3, 1) == [8, 3, 6, 5, 4, 0, 1, 7, 2, 9]
    assert number_at(10**12 - 1, 10**12, 2**64 - 1, 5) == 547_070_434_355


@given(
    num_shards=st.integers(1, 40),
    num_records=st.integers(1, 200),
    group=st.integers(1, 40),
    num_epochs=st.integers(1, 6),
    lead=st.integers(0, 39),
)
def test_shares_have_each_record_once_in_an_epoch_and_differ_by_one_in_all(
    num_shards, num_records, group, num_epochs, lead
):
    lead %= num_shards
    of = functools.partial(
        orders.share,
        num_shards=num_shards,
        num_records=num_records,
        group=min(group, num_shards),
        lead=lead,
    )
    counts = np.zeros(num_shards, int)
    for epoch in range(num_epochs):
        shares = [of(shard, epoch=epoch) for shard in range(num_shards)]
        assert sorted(itertools.chain(*shares)) == list(range(num_records))
        counts += [len(share) for share in shares]
    total = num_epochs * num_records
    # The rows of finite data have no gap before their end.
    assert counts.tolist() == [
        total // num_shards + ((shard - lead) % num_shards < total % num_shards)
        for shard in range(num_shards)
    ]


@given(
    blocks=st.lists(
        st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=20
    ).filter(lambda blocks: any(size for size, _ in blocks)),
    seed=st.sampled_from([None, 0, 5]),
    num_shards=st.integers(1, 40),
    is_large=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_shards_read_each_record_once_in_an_epoch_and_chains_in_order(
    blocks, seed, num_shards, is_large, epoch
):
    sizes = [size for size, _ in blocks]
    chained = [False, *(each for _, each in blocks[1:])]
    made = order_of(
        sizes, num_shards, seed, chained=chained, num_bytes=2**60 * is_large
    )
    read, followed = [], {}
    for shard in range(num_shards):
        taken = 0
        for block, rows, following in parts(made, shard, epoch):
            read += [(block, row) for row in rows]
            followed[block] = following
            for row in rows:
                found = made.find(int(made.first[block]) + row, epoch)
                assert found == (shard, taken)
                taken += 1
    assert sorted(read) == [
        (block, row) for block, size in enumerate(sizes) for row in range(size)
    ]
    for block, following in followed.items():
        if block + 1 < len(sizes) and chained[block + 1]:
            assert following == block + 1


@pytest.mark.parametrize(
    ("num_chains", "length", "size", "num_bytes", "group"),
    [
        # Small: all shards read each block together.
        (20, 1, 100, 2**20, 64),
        # Large: each has runs of its own.
        (20, 1, 5000, 2**20, 1),
        (20, 1, 100, 2**31, 1),
        # Few chains, of blocks that cannot be read without those before.
        (2, 10, 5000, 2**31, 64),
        (32, 5, 5000, 2**31, 4),
        (128, 2, 5000, 2**31, 1),
    ],
)
def test_shards_read_small_data_and_few_chains_together(
    num_chains, length, size, num_bytes, group
):
    number = np.arange(num_chains * length)
    made = order_of(
        [size] * len(number), 64, 3, chained=number % length > 0, num_bytes=num_bytes
    )
    assert made.share(1, 0).step == group
