"""The order of records, and the equal shares that shards have of them."""

import collections
import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import order as orders
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.sources import decoded
from tests import corpora, source_contract, worlds

keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3).map(tuple)


def order_of(sizes, num_shards, seed, *, chained=None, num_bytes=0):
    is_chained = np.zeros(len(sizes), bool) if chained is None else chained
    return orders.Order(
        np.array(sizes),
        is_chained,
        num_bytes=num_bytes,
        num_shards=num_shards,
        seed=seed,
    )


def test_the_orders_of_all_datasets_hold_few_permutations():
    held = []
    for seed in range(3):
        made = order_of([4096] * 250, 1, seed)
        held += [weakref.ref(made._rows(0, block)) for block in range(250)]
        held += [weakref.ref(made._rows(1, block)) for block in range(250)]
    alive = [rows for each in held if (rows := each()) is not None]
    assert sum(rows.nbytes for rows in alive) <= 8 * 2**20


def number_at(place, length, *key):
    return int(orders.permuted(np.array([place]), length=length, key=key)[0])


@given(st.one_of(st.integers(1, 400), st.integers(1, 2**62)), keys)
def test_every_key_permutes_every_length(length, key):
    # All places, or some of many.
    places = range(0, length, -(-length // 400))
    numbers = orders.permuted(np.array(places), length=length, key=key).tolist()
    assert numbers == [number_at(place, length, *key) for place in places]
    assert len(set(numbers)) == len(places)
    assert all(0 <= number < length for number in numbers)


def test_the_orders_of_saved_runs_stay_what_they_are():
    assert [number_at(n, 10, 0, 0) for n in range(10)] == [6, 5, 9, 3, 0, 2, 4, 1, 8, 7]
    assert [number_at(n, 10, 3, 1) for n in range(10)] == [8, 3, 6, 5, 4, 0, 1, 7, 2, 9]
    assert number_at(10**12 - 1, 10**12, 2**64 - 1, 5) == 547_070_434_355


@pytest.mark.parametrize("sizes", [[60], [1] * 60])
def test_blocks_and_their_records_are_shuffled_in_each_epoch(sizes):
    made = order_of(sizes, 1, 1)

    def read(epoch):
        positions, found, due = made.share(0, epoch), [], None
        while len(found) < 60:
            block, rows, following = made.next_in_block(epoch, positions[len(found) :])
            assert due in (None, block)
            found += [(block, row) for row in rows]
            due = following
        return found

    assert sorted(read(0)) == sorted(read(1)) != read(0) != read(1)


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


@pytest.mark.parametrize(
    ("weights", "num_rows", "num_epoch", "size"),
    [([1], 202, 3, 8), ([1, 2, 3] * 7, 5, 1, 32), ([1, 2, 3], 13, 3, 8)],
)
def test_finite_datasets_end_together_and_only_the_last_round_of_shards_has_padding(
    tmp_path, weights, num_rows, num_epoch, size
):
    listed = []
    for first, weight in zip(range(1, 10**6, num_rows), weights, strict=False):
        held = corpora.documents(first, first + num_rows)
        path = corpora.write_parquet(tmp_path / f"{first}", held)
        listed.append(f"{path},{weight}")
    data = pipeline.from_config(
        grain_train_files=";".join(listed),
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        max_target_length=2,
        num_logical_shards=16,
        num_epoch=num_epoch,
    )
    batches = worlds.World(data, 2, size).rest()
    numbers = np.concatenate([b["inputs"][b["mask"], 0] for b in batches])
    total = len(weights) * num_rows
    assert sorted(numbers.tolist()) == sorted([*range(1, total + 1)] * num_epoch)
    # Those of the last round are the last in which each shard has its turn.
    assert all(batch["mask"].all() for batch in batches[: -16 // size])


@pytest.mark.parametrize(
    ("small_records", "budget", "times"), [(2**20, 2**20, 1), (2**20, 1, 2), (0, 0, 1)]
)
def test_a_block_is_decoded_again_if_shards_share_it_and_there_is_no_room(
    monkeypatch, small_records, budget, times
):
    monkeypatch.setattr(orders, "_SMALL_RECORDS", small_records)
    monkeypatch.setattr(decoded, "BUDGET_BYTES", budget)
    decoded._KEPT.begin()
    counts, decode = collections.Counter(), corpora.Numbers.decode

    def counting(self, file, block):
        counts[file, block] += 1
        return decode(self, file, block)

    monkeypatch.setattr(corpora.Numbers, "decode", counting)
    # A shard takes 64 records at a time.
    numbers = corpora.Numbers(blocks=((100, 100),) * 8)
    reading = {"shuffle_seed": small_records, "num_epochs": 1}
    shards = [source_contract.read(numbers, shard, 2, **reading) for shard in range(2)]
    found = itertools.chain(*shards)
    if not small_records:
        # A shard keeps the block that it reads.
        found = source_contract.in_turn(map(iter, shards))
    assert sorted(element["number"] for element in found) == list(range(1600))
    assert [*counts.values()] == [times] * 16
    assert decoded._KEPT.num_bytes <= max(budget, 2**12)
