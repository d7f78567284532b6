"""Shards have equal shares of the records."""

import collections
import contextlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.data import order, records
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.sources import decoded, parquet
from tests import worlds


def numbered(directory, *, num_files, num_rows, row_group):
    """Files of documents of two tokens, the first of which is the document's number."""
    paths = []
    for file in range(num_files):
        first = 1 + file * num_rows
        column = [[number, 1] for number in range(first, first + num_rows)]
        paths.append(str(directory / f"{file}.parquet"))
        table = pa.table({"tokens": pa.array(column, pa.list_(pa.int32()))})
        pq.write_table(table, paths[-1], row_group_size=row_group)
    return paths


def finite(paths, *, num_shards, num_epoch=1):
    return pipeline.from_config(
        grain_train_files=",".join(paths),
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        max_target_length=2,
        num_logical_shards=num_shards,
        num_epoch=num_epoch,
    )


def until_end(data, size):
    world = worlds.World(data, 2, size)
    batches = []
    while True:
        try:
            batches.append(world.batch())
        except StopIteration:
            return batches


@pytest.mark.parametrize(
    ("row_group", "num_epoch", "small_blocks", "size"),
    [(7, 3, True, 8), (100, 1, False, 8), (7, 3, True, 32), (100, 1, False, 16)],
)
def test_finite_rows_end_together_and_only_the_last_round_of_shards_has_padding(
    tmp_path, monkeypatch, row_group, num_epoch, small_blocks, size
):
    if not small_blocks:
        monkeypatch.setattr(order, "_SMALL_RECORDS", 0)
    paths = numbered(tmp_path, num_files=2, num_rows=101, row_group=row_group)
    data = finite(paths, num_shards=16, num_epoch=num_epoch)
    batches = until_end(data, size)
    numbers = np.concatenate([b["inputs"][b["mask"], 0] for b in batches])
    assert sorted(numbers.tolist()) == sorted([*range(1, 203)] * num_epoch)
    assert all(batch["mask"].all() for batch in before_the_last_round(batches, 16))


def before_the_last_round(batches, num_shards):
    """The batches before the last ones in which each shard has its turn."""
    return batches[: -num_shards // len(batches[0]["mask"])]


def finite_mixture(directory, *, num_rows, weights, num_shards, **keys):
    """One dataset of each weight, all of the same number of documents."""
    paths = numbered(
        directory, num_files=len(weights), num_rows=num_rows, row_group=num_rows
    )
    parts = {
        f"d{number:02d}": {"path": path, "weight": weight}
        for number, (path, weight) in enumerate(zip(paths, weights, strict=True))
    }
    (directory / "mixture.json").write_text(json.dumps(parts))
    return pipeline.from_config(
        grain_train_mixture_config_path=str(directory / "mixture.json"),
        grain_file_type="parquet",
        train_data_columns="tokens",
        tokenize_train_data=False,
        max_target_length=2,
        num_logical_shards=num_shards,
        **{"num_epoch": 1, **keys},
    )


@pytest.mark.parametrize(
    ("num_datasets", "num_rows", "num_epoch", "size", "small_blocks"),
    [(20, 5, 1, 16, False), (3, 13, 3, 8, True)],
)
def test_the_datasets_of_a_finite_mixture_end_together(
    tmp_path, monkeypatch, num_datasets, num_rows, num_epoch, size, small_blocks
):
    if not small_blocks:
        monkeypatch.setattr(order, "_SMALL_RECORDS", 0)
    more = {
        "num_rows": num_rows,
        "weights": [1 + number % 3 for number in range(num_datasets)],
        "num_shards": 16,
        "num_epoch": num_epoch,
    }
    batches = until_end(finite_mixture(tmp_path, **more), size)
    numbers = np.concatenate([b["inputs"][b["mask"], 0] for b in batches])
    total = num_datasets * num_rows * num_epoch
    assert len(numbers) == total
    assert set(collections.Counter(numbers.tolist()).values()) == {num_epoch}
    assert all(batch["mask"].all() for batch in before_the_last_round(batches, 16))


@pytest.mark.parametrize(
    ("before", "weights"),
    [((1, 0, 1), (1, 1, 1)), ((1, 1, 1), (1, 0, 1)), ((0, 1, 1), (0, 3, 1))],
)
def test_other_weights_of_a_finite_mixture_lose_and_repeat_nothing(
    tmp_path, before, weights
):
    more = {"num_rows": 21, "num_shards": 8}
    old = finite_mixture(tmp_path, weights=before, **more)
    world = worlds.World(old, 2, 8)
    batches = [world.batch() for _ in range(3)]
    world.write(tmp_path / "state")
    new = finite_mixture(tmp_path, weights=weights, **more)
    resumed = worlds.World(new, 4, 8)
    resumed.read(tmp_path / "state")
    with contextlib.suppress(StopIteration):
        while True:
            batches.append(resumed.batch())
    numbers = np.concatenate([b["inputs"][b["mask"], 0] for b in batches]).tolist()
    assert len(numbers) == len(set(numbers))
    drawn = [n for n in range(3) if weights[n]]
    assert set(numbers) >= {1 + n * 21 + row for n in drawn for row in range(21)}


def test_an_endless_mixture_has_the_shares_of_each_dataset(tmp_path):
    more = {"num_rows": 5, "weights": [1, 1], "num_shards": 8, "num_epoch": 0}
    data = finite_mixture(tmp_path, **more)
    assert data.identity()["dealing"] == "shares"


def test_small_blocks_are_shuffled_record_by_record_in_each_epoch(tmp_path):
    paths = numbered(tmp_path, num_files=1, num_rows=60, row_group=60)
    read = records.Records(
        parquet.Parquet(files=tuple(paths)),
        shard=0,
        num_shards=1,
        read_options=records.ReadOptions(shuffle_seed=1, num_epochs=2),
    )
    numbers = [int(element["tokens"][0]) for element in read]
    first, second = numbers[:60], numbers[60:]
    assert sorted(first) == sorted(second) == list(range(1, 61))
    assert first != second
    assert first != sorted(first)


@pytest.fixture
def read(monkeypatch):
    """The file and the block of each that is decoded from now on."""
    read, decode = [], parquet.Parquet.decode

    def counted(self, file, block):
        read.append((file, block))
        return decode(self, file, block)

    monkeypatch.setattr(parquet.Parquet, "decode", counted)
    return read


def test_blocks_are_decoded_again_if_there_is_no_room_for_them(
    tmp_path, monkeypatch, read
):
    paths = numbered(tmp_path, num_files=12, num_rows=64, row_group=16)
    expected = until_end(finite(paths, num_shards=8), 8)
    for budget, is_again in ((2**20, False), (1, True)):
        decoded._KEPT.begin()
        read.clear()
        monkeypatch.setattr(decoded, "BUDGET_BYTES", budget)
        actual = until_end(finite(paths, num_shards=8), 8)
        assert [b["inputs"].tolist() for b in actual] == [
            b["inputs"].tolist() for b in expected
        ]
        assert (len(read) > len(set(read))) == is_again
        assert len(set(read)) == 48
        assert decoded._KEPT.num_bytes <= max(budget, 2**12)


@pytest.mark.usefixtures("large_blocks")
def test_a_shard_of_large_data_decodes_each_block_of_its_run_once(
    tmp_path, monkeypatch, read
):
    monkeypatch.setattr(decoded, "BUDGET_BYTES", 0)
    paths = numbered(tmp_path, num_files=8, num_rows=50, row_group=25)
    dataset = parquet.Parquet(files=tuple(paths))
    options = records.ReadOptions(shuffle_seed=1, num_epochs=1)
    shards = [
        iter(records.Records(dataset, shard=n, num_shards=4, read_options=options))
        for n in range(4)
    ]
    numbers = [
        int(shard.take_tokens("tokens", 1)[0][0])
        for _ in range(100)
        for shard in shards
    ]
    assert sorted(numbers) == list(range(1, 401))
    assert len(read) == len(set(read)) == 16
