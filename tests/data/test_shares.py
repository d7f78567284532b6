"""Shards have equal shares of the records."""

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


def mixture(directory, *, num_rows, weights, row_group=100, **keys):
    """One dataset of each weight, all of the same number of documents."""
    paths = numbered(
        directory, num_files=len(weights), num_rows=num_rows, row_group=row_group
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
        **{"num_logical_shards": 16, "num_epoch": 1, **keys},
    )


def until_end(data, size):
    return worlds.World(data, 2, size).rest()


def numbers_of(batches):
    return np.concatenate([b["inputs"][b["mask"], 0] for b in batches]).tolist()


@pytest.mark.parametrize(
    ("weights", "num_rows", "row_group", "num_epoch", "size", "is_small"),
    [
        ([1], 202, 7, 3, 8, True),
        ([1], 202, 100, 1, 16, False),
        ([1, 2, 3] * 7, 5, 5, 1, 32, False),
        ([1, 2, 3], 13, 13, 3, 8, True),
    ],
)
def test_finite_datasets_end_together_and_only_the_last_round_of_shards_has_padding(
    tmp_path, monkeypatch, weights, num_rows, row_group, num_epoch, size, is_small
):
    if not is_small:
        monkeypatch.setattr(order, "_SMALL_RECORDS", 0)
    more = {"num_rows": num_rows, "row_group": row_group, "num_epoch": num_epoch}
    batches = until_end(mixture(tmp_path, weights=weights, **more), size)
    total = len(weights) * num_rows
    assert sorted(numbers_of(batches)) == sorted([*range(1, total + 1)] * num_epoch)
    # Those of the last round are the last in which each shard has its turn.
    assert all(batch["mask"].all() for batch in batches[: -16 // size])


@pytest.mark.parametrize(
    ("before", "weights"),
    [((1, 0, 1), (1, 1, 1)), ((1, 1, 1), (1, 0, 1)), ((0, 1, 1), (0, 3, 1))],
)
def test_other_weights_of_a_finite_mixture_lose_and_repeat_nothing(
    tmp_path, before, weights
):
    more = {"num_rows": 21, "num_logical_shards": 8}
    world = worlds.World(mixture(tmp_path, weights=before, **more), 2, 8)
    batches = [world.batch() for _ in range(3)]
    world.write(tmp_path / "state")
    resumed = worlds.World(mixture(tmp_path, weights=weights, **more), 4, 8)
    resumed.read(tmp_path / "state")
    numbers = numbers_of(batches + resumed.rest())
    assert len(numbers) == len(set(numbers))
    drawn = [n for n in range(3) if weights[n]]
    assert set(numbers) >= {1 + n * 21 + row for n in drawn for row in range(21)}


def test_an_endless_mixture_has_the_shares_of_each_dataset(tmp_path):
    data = mixture(tmp_path, num_rows=5, weights=[1, 1], num_epoch=0)
    assert data.identity()["dealing"] == "shares"


@pytest.mark.parametrize("row_group", [60, 1])
def test_blocks_and_their_records_are_shuffled_in_each_epoch(tmp_path, row_group):
    paths = numbered(tmp_path, num_files=1, num_rows=60, row_group=row_group)
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
    data = mixture(tmp_path, num_rows=768, weights=[1], row_group=16)
    expected = numbers_of(until_end(data, 8))
    for budget, is_again in ((2**20, False), (1, True)):
        decoded._KEPT.begin()
        read.clear()
        monkeypatch.setattr(decoded, "BUDGET_BYTES", budget)
        assert numbers_of(until_end(data, 8)) == expected
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
