import functools
import itertools
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import units

files = st.lists(
    st.lists(st.integers(0, 60), max_size=8), min_size=1, max_size=6
).filter(lambda blocks: any(map(any, blocks)))
shard_counts = st.integers(1, 40)
keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3).map(tuple)


def cut(blocks, num_shards):
    return units.cut([np.array(b, np.int64) for b in blocks], num_shards)


def test_the_orders_of_all_datasets_hold_few_permutations():
    held = []
    for seed in range(3):
        order = units.Order.of(cut([[4096] * 600], 0), (seed, 0), with_rows=True)
        held += [weakref.ref(order.rows(index)) for index in range(600)]
    alive = [rows for each in held if (rows := each()) is not None]
    assert sum(rows.nbytes for rows in alive) <= 8 * 2**20


def expected_units(blocks):
    """File, block and place in it of every record, in order."""
    return [
        (file, block, place)
        for file, counts in enumerate(blocks)
        for block, count in enumerate(counts)
        for place in range(count)
    ]


def filled(blocks):
    return [count for counts in blocks for count in counts if count]


def order(length, *key):
    return units.permuted(np.arange(length), length=length, key=key).tolist()


def number_at(place, length, *key):
    return int(units.permuted(np.array([place]), length=length, key=key)[0])


@given(files, shard_counts)
def test_every_record_is_in_one_unit_and_units_are_in_record_order(blocks, num_shards):
    every = expected_units(blocks)
    actual = cut(blocks, num_shards)
    assert actual.total_records == len(every)
    found = []
    for unit in (actual[n] for n in range(len(actual))):
        assert unit.num_records > 0
        assert every[unit.record] == (unit.file, unit.block, unit.first)
        assert unit.block_records == blocks[unit.file][unit.block]
        found += [
            (unit.file, unit.block, unit.first + n) for n in range(unit.num_records)
        ]
    assert found == every


@given(files, shard_counts)
def test_only_few_blocks_are_cut_and_into_equal_parts_for_all_shards(
    blocks, num_shards
):
    actual = cut(blocks, num_shards)
    counts = np.array(filled(blocks))
    if len(counts) >= 4 * num_shards:
        assert actual.num_records.tolist() == counts.tolist()
        return
    wanted = num_shards * -(-len(counts) // num_shards)
    assert len(actual) == min(wanted, actual.total_records)
    # The largest part is as small as so many parts allow.
    largest = actual.num_records.max()
    if largest > 1:
        assert (-(-counts // (largest - 1))).sum() > len(actual)
    for block in set(zip(actual.file.tolist(), actual.block.tolist(), strict=True)):
        mine = (actual.file == block[0]) & (actual.block == block[1])
        assert np.ptp(actual.num_records[mine]) <= 1


@given(st.integers(1, 300), keys)
def test_every_key_permutes_every_length(length, key):
    assert sorted(order(length, *key)) == list(range(length))


@given(st.integers(1, 2**62), keys, st.data())
def test_a_permutation_of_any_length_gives_two_places_two_numbers(length, key, data):
    asked = data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=20))
    actual = {number_at(place, length, *key) for place in asked}
    assert len(actual) == len(asked)
    assert all(0 <= number < length for number in actual)


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(order(50, seed, epoch)) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


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
        units.share,
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
    num_shards=st.integers(1, 40),
    num_records=st.integers(1, 200),
    group=st.integers(1, 40),
    epoch=st.integers(0, 6),
    lead=st.integers(0, 39),
    data=st.data(),
)
def test_the_reader_of_a_place_is_the_shard_that_has_it(
    num_shards, num_records, group, epoch, lead, data
):
    more = {
        "num_shards": num_shards,
        "num_records": num_records,
        "epoch": epoch,
        "group": min(group, num_shards),
        "lead": lead % num_shards,
    }
    place = data.draw(st.integers(0, num_records - 1))
    shard, taken = units.reader(place, **more)
    assert units.share(shard, **more)[taken] == place


@given(st.integers(1, 400), keys)
def test_all_numbers_are_permuted_as_single_ones(length, key):
    singly = [number_at(place, length, *key) for place in range(length)]
    assert order(length, *key) == singly


@given(files, st.integers(0, 9), st.integers(0, 3), st.integers(1, 40))
def test_the_order_of_an_epoch_has_each_record_once(blocks, seed, epoch, step):
    whole = cut(blocks, 0)
    made = units.Order.of(whole, (seed, epoch), with_rows=True)
    read = []
    for first in range(step):
        places = range(first, whole.total_records, step)
        picked = made.picked(places)
        assert sum(len(rows) for _, rows in picked) == len(places)
        read += [
            int(whole.record[number]) + int(row)
            for number, rows in picked
            for row in rows
        ]
    assert sorted(read) == list(range(whole.total_records))
