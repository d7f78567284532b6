"""Figures of the suite `data_state` for a thousand datasets in one process.

Each dataset is a Parquet file of about 4 MiB in 16 row groups, of documents of 150
tokens; weights are those of Zipf's law. One process runs 256 logical shards, joined and
cut to rows of 2048 tokens in global batches of 256 rows, as `from_config` builds them.

* `thousand_first_batch_secs`: from the call of `from_config` to the first batch, with
  no footer read before.
* `thousand_memory_gib`: the most memory of the process, with its modules.
* `thousand_rate_mtok_per_sec`: tokens a second by the clock, over the batches after the
  first; `thousand_rate_ratio`: over that of one dataset of the same files.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import pathlib
import resource
import time

from benchmarks import report
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import rows, sharded_data
from elastic_ckpt.data.lm import pipeline

_NUM_DATASETS = 1000
_NUM_SHARDS = 256
_NUM_BATCHES = 60
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class _Run:
    first_batch_secs: float
    memory_gib: float
    mtok_per_sec: float


def measure(directory: pathlib.Path) -> dict[str, report.Figure]:
    """Measures it, with the files in `directory`."""
    source = Documents(
        directory=directory,
        num_files=_NUM_DATASETS,
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
        of_many.append(_in_new_process(many, directory / "many.json"))
        of_one.append(_in_new_process(one, directory / "one.json"))
    return {
        "thousand_first_batch_secs": _figure(
            "s", "at most 3", [run.first_batch_secs for run in of_many]
        ),
        "thousand_memory_gib": _figure(
            "GiB", "at most 1", [run.memory_gib for run in of_many]
        ),
        "thousand_rate_mtok_per_sec": _figure(
            "Mtok/s", "no bound", [run.mtok_per_sec for run in of_many]
        ),
        "thousand_rate_ratio": _figure(
            "",
            "at least 0.5 of one dataset",
            [
                each.mtok_per_sec / alone.mtok_per_sec
                for each, alone in zip(of_many, of_one, strict=True)
            ],
        ),
    }


def _figure(unit: str, against: str, samples: list[float]) -> report.Figure:
    return report.Figure(unit=unit, against=against, samples=tuple(samples))


def _in_new_process(mixture: object, config: pathlib.Path) -> _Run:
    config.write_text(json.dumps(mixture))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (str(config),))


def _run(config: str) -> _Run:
    began = time.perf_counter()
    data = pipeline.from_config(
        grain_train_mixture_config_path=config,
        grain_file_type="parquet",
        train_data_columns=COLUMN,
        tokenize_train_data=False,
        num_logical_shards=_NUM_SHARDS,
        max_target_length=peer.ROW_LENGTH,
        use_truncation=False,
        packing=True,
        grain_packing_type="concat_then_split",
    )
    assert isinstance(data, sharded_data.ShardedData)
    host = data.host_batches(
        rows.Placement.in_order(0, num_hosts=1, global_batch_size=_NUM_SHARDS)
    )
    next(host)
    first_batch_secs = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(_NUM_BATCHES):
        next(host)
    secs = time.perf_counter() - began
    host.close()
    num_tokens = _NUM_BATCHES * _NUM_SHARDS * peer.ROW_LENGTH
    return _Run(
        first_batch_secs=first_batch_secs,
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        mtok_per_sec=num_tokens / secs / 1e6,
    )
