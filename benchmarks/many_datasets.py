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

import json
import pathlib
import time

from benchmarks import data as data_suite
from benchmarks import memory, report, turns
from benchmarks.peers import peer
from benchmarks.peers.documents import Documents
from elastic_ckpt.data import rows

_NUM_SHARDS = 256
_NUM_BATCHES = 60
_ROUNDS = 3


def measure(
    directory: pathlib.Path, *, num_datasets: int = 1000, rounds: int = _ROUNDS
) -> dict[str, report.Figure]:
    """Measures it, with the files in `directory`."""
    source = Documents(
        directory=directory,
        num_files=num_datasets,
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
    configs = {"many": directory / "many.json", "one": directory / "one.json"}
    configs["many"].write_text(json.dumps(many))
    configs["one"].write_text(json.dumps(one))
    of_many, of_one = [], []
    for _ in range(rounds):
        of_many.append(turns.in_new_process(_run, str(configs["many"])))
        of_one.append(turns.in_new_process(_run, str(configs["one"])))
    first_secs, gib, rates = zip(*of_many, strict=True)
    *_, rates_of_one = zip(*of_one, strict=True)
    return {
        "thousand_first_batch_secs": report.figure("s", "at most 3", first_secs),
        "thousand_memory_gib": report.figure("GiB", "at most 1", gib),
        "thousand_rate_mtok_per_sec": report.figure("Mtok/s", "no bound", rates),
        "thousand_rate_ratio": report.ratio(
            rates, rates_of_one, "at least 0.5 of one dataset"
        ),
    }


def _run(config: str) -> tuple[float, float, float]:
    # Seconds until the first batch, GiB, and millions of tokens a second.
    began = time.perf_counter()
    data = data_suite.configured(
        grain_train_mixture_config_path=config, num_logical_shards=_NUM_SHARDS
    )
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
    return (
        first_batch_secs,
        memory.resident_bytes("VmHWM") / 2**30,
        num_tokens / secs / 1e6,
    )
