"""Suite `data_state`: the cost of the sharded engine's state.

The data is the same as in suite `data`: pre-tokenized Parquet, joined and cut to rows
of 2048 tokens.

* `state_bytes_per_shard`: the size of the cursor files after 300 batches of 64 shards,
  as `train` writes them for one dataset, shuffled in windows of 100; the largest value
  of all packings, trimmed and chunked.

One process reads a thousand datasets in 256 shards, as `from_config` builds them. Each
dataset is a Parquet file of about 4 MiB in 16 row groups, with documents of 150 tokens;
the weights follow Zipf's law.

* `thousand_first_batch_secs`: time from the call of `from_config` to the first batch,
  with no footer read before.
* `thousand_memory_gib`: the peak memory of the process, including modules.
* `thousand_rate_mtok_per_sec`: tokens per second of wall-clock time over the batches
  after the first; `thousand_rate_ratio`: relative to one dataset of the same files.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import tempfile
import time
from typing import Any

from benchmarks import data as data_suite
from benchmarks import report, sized, turns
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import cursors, records, rows
from elastic_ckpt.data.lm import documents, pipeline
from elastic_ckpt.data.lm import rows as lm_rows
from elastic_ckpt.data.sharded_data import ShardedData
from elastic_ckpt.data.sources import parquet

_FILES = sized(16, 2)
_BATCHES = sized(300, 2)
_DATASETS = sized(1000, 3)
_SHARDS_OF_THOUSAND = 256
_BATCHES_OF_THOUSAND = 60
_ROUNDS = 3


def measure() -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = pathlib.Path(name)
        state_bytes = report.figure("B", "at most 200", [_state_bytes(directory)])
        figures = _thousand(directory / "thousand")
    return figures | {"state_bytes_per_shard": state_bytes}


def _state_bytes(directory: pathlib.Path) -> float:
    source = Documents(directory=directory / "corpus", num_files=_FILES)
    source.write()
    only = pipeline.Part(
        name="train",
        source=parquet.Parquet(files=tuple(source.files), columns=(COLUMN,)),
        weight=1.0,
    )
    num_shards = data_suite.NUM_SHARDS
    largest = 0.0
    for packing, truncate in itertools.product(("", *lm_rows.PACKINGS), (True, False)):
        make_shard = pipeline.LanguagePipeline(
            parts=(only,),
            num_shards=num_shards,
            reading=records.ReadOptions(shuffle_seed=0),
            documents=documents.Documents(column=COLUMN, tokenizer=None),
            length=512,
            truncate=truncate,
            window=peer.SHUFFLE_WINDOW,
            packing=packing,
        )
        host = _host(ShardedData(make_shard=make_shard, num_shards=num_shards))
        for _ in range(_BATCHES):
            next(host)
        to = directory / f"{packing}-{truncate}"
        position, held = host.get_state()
        cursors.write(to, held, position)
        num_bytes = sum(path.stat().st_size for path in to.iterdir())
        largest = max(largest, num_bytes / num_shards)
        host.close()
    return largest


def _host(data: ShardedData) -> Any:
    # The batches of the only host, with one row from each shard.
    return data.host_batches(rows.in_order(1, data.num_shards)[0])


def _thousand(directory: pathlib.Path) -> dict[str, report.Figure]:
    source = Documents(
        directory=directory,
        num_files=_DATASETS,
        documents_a_file=9600,
        documents_a_row_group=600,
        mean_length=150,
    )
    source.write()
    many = {
        f"dataset-{number:04d}": {"path": path, "weight": 1 / (number + 1)}
        for number, path in enumerate(source.files)
    }
    one = {"all": {"path": f"{directory}/documents-*.parquet", "weight": 1}}
    of_many, of_one = [], []
    for _ in range(_ROUNDS):
        for config, measured in ((many, of_many), (one, of_one)):
            path = directory / "config.json"
            path.write_text(json.dumps(config))
            measured.append(turns.in_new_process(_run, str(path)))
    first_secs, gib, rates = zip(*of_many, strict=True)
    return {
        "thousand_first_batch_secs": report.figure("s", "at most 3", first_secs),
        "thousand_memory_gib": report.figure("GiB", "at most 1", gib),
        "thousand_rate_mtok_per_sec": report.figure("Mtok/s", "no bound", rates),
        "thousand_rate_ratio": report.ratio(
            rates, [rate for *_, rate in of_one], "at least 0.5; one dataset"
        ),
    }


def _run(config: str) -> tuple[float, float, float]:
    # Seconds until the first batch, GiB, and millions of tokens per second.
    began = time.perf_counter()
    host = _host(
        data_suite.configured(
            grain_train_mixture_config_path=config,
            num_logical_shards=_SHARDS_OF_THOUSAND,
        )
    )
    next(host)
    first_batch_secs = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(_BATCHES_OF_THOUSAND):
        next(host)
    secs = time.perf_counter() - began
    host.close()
    num_tokens = _BATCHES_OF_THOUSAND * _SHARDS_OF_THOUSAND * peer.ROW_LENGTH
    return first_batch_secs, turns.peak_gib(), num_tokens / secs / 1e6
