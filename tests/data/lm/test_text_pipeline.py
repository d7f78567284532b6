"""Pipelines of text, tokenised by tokenizers of files."""

import dataclasses

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from elastic_ckpt.data import cursors, data_keys, state
from elastic_ckpt.data.lm import documents, pipeline
from tests import worlds
from tests.data.lm import test_tokenizers


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface"])
def texts_config(request, tmp_path_factory):
    """Two datasets of texts, chunked, shuffled, packed, for a tokenizer of a file."""
    directory = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        column = [f"{name} {n} fox " * (n * 5 % 23) for n in range(150)]
        pq.write_table(pa.table({"text": column}), directory / name, row_group_size=9)
    return data_keys.DataKeys(
        grain_train_files=f"{directory}/one,2;{directory}/two,1",
        num_logical_shards=4,
        max_target_length=16,
        grain_file_type="parquet",
        tokenizer_type=request.param,
        tokenizer_path=test_tokenizers.written(directory, request.param),
        use_truncation=False,
        packing=True,
        grain_packing_type="concat_then_split",
        grain_shuffle_buffer_size=3,
    )


def test_threads_of_a_tokenizer_change_neither_rows_nor_states(texts_config, tmp_path):
    one = worlds.World(pipeline.from_config(texts_config), 1, 8)
    world, saved = one, one.save()
    for number, (num_hosts, threads) in enumerate([(2, 1), (4, 3), (1, 2), (2, 0)]):
        config = dataclasses.replace(texts_config, tokenizer_threads=threads)
        world = worlds.World(pipeline.from_config(config), num_hosts, 8)
        world.load(saved)
        for _ in range(5):
            assert worlds.content(world.batch()) == worlds.content(one.batch())
        directory = tmp_path / str(number)
        world.write(directory)
        one.write(tmp_path / f"{number} one")
        held = [
            cursors.read(path, range(4), state.read(path).position)
            for path in (directory, tmp_path / f"{number} one")
        ]
        assert held[0] == held[1]
        saved = world.save()


def test_worker_processes_share_the_threads_of_a_host(texts_config, monkeypatch):
    monkeypatch.setattr(documents, "_num_cores", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for settings, expected in (
        ({}, 12),
        ({"grain_worker_count": 3}, 4),
        ({"tokenizer_threads": 5}, 5),
        ({"tokenizer_threads": 5, "grain_worker_count": 2}, 2),
    ):
        config = dataclasses.replace(texts_config, **settings)
        made = pipeline.from_config(config).make_shard
        assert made.threads_of_process() == expected
    in_bytes = dataclasses.replace(
        texts_config, tokenizer_type="bytes", tokenizer_path=""
    )
    assert pipeline.from_config(in_bytes).make_shard.threads_of_process() == 0
