"""Suite `data_state`: what the state of the sharded engine costs, and a resume.

The data is that of the suite `data`: pre-tokenised Parquet, 64 logical shards, joined
and cut to rows of 2048 tokens, here also shuffled in windows of 100.

* `state_bytes_per_shard`: of the cursor files after 300 batches, as `train` writes them
  for one dataset, shuffled; the largest of all packings, trimmed and chunked.
* `get_state_64_shards_ms`: position and cursors of all shards, ready for JSON.
* `idle_shard_mib`: memory that a process has more, for each of 64 opened shards, when
  each has given a row; `idle_shard_large_groups_mib` with row groups four times as
  large, of 8 MB, which stay open.
* `resume_64_shards_secs`: from a state in files to the first batch, with no file or
  footer open yet; the slowest of the positions 0, half and end of an epoch, which are
  printed too.
* `plan_10k_hosts_secs`: units, rows and shards of 10,000 hosts, 20,000 rows a batch,
  and 1e9 records.
* `thousand_...`: see `benchmarks.many_datasets`.
* `mixture_threads`, `mixture_mib`: threads, and memory that a process has more, when a
  host runs 35 datasets in each of 64 shards.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from benchmarks import data as data_suite
from benchmarks import many_datasets, report
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import (
    cursors,
    datasets,
    elastic_data,
    mixing,
    records,
    rows,
    units,
)
from elastic_ckpt.data.lm import language, pipeline
from elastic_ckpt.data.sharded_data import ShardedData
from elastic_ckpt.data.sources import parquet

_MakeShard = Callable[[int], grain.IterDataset]
_NUM_SHARDS = data_suite.NUM_SHARDS
_ROUNDS = 7
_NUM_DATASETS = 35
_CHUNK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """A shard of many datasets, a row a document."""

    datasets: tuple[tuple[str, ...], ...]

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of `shard`."""
        parts = {
            f"dataset-{number:02d}": _documents(files, shard)
            for number, files in enumerate(self.datasets)
        }
        weights = {name: 1.0 + number for number, name in enumerate(parts)}
        return mixing.Mixture(parts, weights, shard=shard).map(_first_tokens)


def measure() -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = pathlib.Path(name)
        source = Documents(directory=directory / "corpus")
        source.write()
        files = tuple(source.files)
        shuffled = data_suite.configured(files, window=100).make_shard
        idle = [_in_new_process(_idle_mib, shuffled) for _ in range(3)]
        mixed = _in_new_process(_mixture, _mixed(directory))
        large = Documents(
            directory=directory / "large",
            documents_a_file=20_000,
            documents_a_row_group=4000,
        )
        large.write()
        idle_large = _in_new_process(
            _idle_mib, data_suite.configured(large.files, window=100).make_shard
        )
        thousand = many_datasets.measure(directory / "thousand")
        return {
            **thousand,
            "state_bytes_per_shard": _figure(
                "B", "at most 200", [_state_bytes(files, directory / "state")]
            ),
            "get_state_64_shards_ms": _figure("ms", "below 1", _get_state_ms(shuffled)),
            "idle_shard_mib": _figure("MiB", "at most 1", idle),
            "idle_shard_large_groups_mib": _figure("MiB", "no bound", [idle_large]),
            **_resume(shuffled, source, directory),
            "plan_10k_hosts_secs": _figure("s", "below 0.1", _plan_secs()),
            "mixture_threads": _figure("", "bounded: 35 x 64 pipelines", [mixed[0]]),
            "mixture_mib": _figure("MiB", "bounded: 35 x 64 pipelines", [mixed[1]]),
        }


def _figure(unit: str, against: str, samples: list[float]) -> report.Figure:
    return report.Figure(unit=unit, against=against, samples=tuple(samples))


def _documents(files: tuple[str, ...], shard: int) -> grain.IterDataset:
    return records.Records(
        parquet.Parquet(files=files, columns=(COLUMN,)),
        shard=shard,
        num_shards=_NUM_SHARDS,
        read_options=records.ReadOptions(shuffle_seed=0),
    )


def _first_tokens(element: dict[str, Any]) -> dict[str, np.ndarray]:
    return {COLUMN: np.resize(element[COLUMN], _CHUNK)}


def _host(make_shard: _MakeShard) -> elastic_data.HostBatches:
    placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=_NUM_SHARDS)
    made = ShardedData(make_shard=make_shard, num_shards=_NUM_SHARDS)
    return made.host_batches(placement)


def _advanced(make_shard: _MakeShard, num_batches: int) -> elastic_data.HostBatches:
    host = _host(make_shard)
    for _ in range(num_batches):
        next(host)
    return host


def _state_bytes(files: tuple[str, ...], directory: pathlib.Path) -> float:
    largest = 0.0
    only = pipeline.Part(
        name=datasets.ONLY,
        source=parquet.Parquet(files=files, columns=(COLUMN,)),
        weight=1.0,
    )
    for packing, truncate in itertools.product(("", *language.PACKINGS), (True, False)):
        host = _advanced(
            pipeline.LanguagePipeline(
                parts=(only,),
                num_shards=_NUM_SHARDS,
                reading=records.ReadOptions(shuffle_seed=0),
                documents=language.Documents(column=COLUMN, tokenizer=None),
                length=512,
                truncate=truncate,
                window=100,
                packing=packing,
            ),
            300,
        )
        to = directory / f"{packing}-{truncate}"
        cursors.write(to, host.shard_cursors(), host.position())
        size = sum(path.stat().st_size for path in to.iterdir())
        largest = max(largest, size / _NUM_SHARDS)
        host.close()
    return largest


def _get_state_ms(make_shard: _MakeShard) -> list[float]:
    host = _advanced(make_shard, 50)
    samples = []
    for _ in range(_ROUNDS * 10):
        began = time.perf_counter()
        host.position(), host.shard_cursors()
        samples.append(1000 * (time.perf_counter() - began))
        next(host)
    host.close()
    return samples


def _resume(
    make_shard: _MakeShard, source: Documents, directory: pathlib.Path
) -> dict[str, report.Figure]:
    epoch = source.num_tokens // 2048 // _NUM_SHARDS
    figures = {}
    for place, num_batches in {"0": 0, "half": epoch // 2, "end": epoch - 1}.items():
        host = _advanced(make_shard, num_batches)
        to = directory / f"resume-{place}"
        position = host.position()
        cursors.write(to, host.shard_cursors(), position)
        host.close()
        state = (str(to), json.dumps(position))
        samples = [
            _in_new_process(_resume_secs, (make_shard, *state)) for _ in range(3)
        ]
        figures[f"resume_64_shards_secs_at_{place}"] = _figure(
            "s", f"below 1, at position {place} of an epoch", samples
        )
    slowest = max(figures.values(), key=lambda figure: figure.value)
    return {"resume_64_shards_secs": slowest} | figures


def _resume_secs(state: tuple[_MakeShard, str, str]) -> float:
    make_shard, directory, text = state
    position = json.loads(text)
    began = time.perf_counter()
    host = _host(make_shard)
    host.go_to(position, lambda shards: cursors.read(directory, shards, position))
    next(host)
    secs = time.perf_counter() - began
    host.close()
    return secs


def _plan_secs() -> list[float]:
    samples = []
    for _ in range(_ROUNDS):
        blocks = [np.full(1000, 1000)] * 1000
        began = time.perf_counter()
        cut = units.cut(blocks, 40_000)
        batch = rows.BatchRows(num_shards=40_000, global_batch_size=20_000)
        placement = rows.Placement.in_order(
            0, num_hosts=10_000, global_batch_size=20_000
        )
        assigned = rows.assign(batch, placement.row_hosts, 123 * 20_000)
        samples.append(time.perf_counter() - began)
        assert cut.total_records == 10**9
        assert len(assigned) == 10_000
    return samples


def _mixed(directory: pathlib.Path) -> Mixed:
    samples = []
    for number in range(_NUM_DATASETS):
        source = Documents(
            directory=directory / f"dataset-{number}",
            num_files=2,
            documents_a_file=2000,
            seed=number,
        )
        source.write()
        samples.append(tuple(source.files))
    return Mixed(datasets=tuple(samples))


def _mixture(make_shard: Mixed) -> tuple[float, float]:
    before = _resident_mib()
    host = _advanced(make_shard, 300)
    usage = float(len(os.listdir("/proc/self/task"))), _resident_mib() - before
    host.close()
    return usage


def _idle_mib(make_shard: _MakeShard) -> float:
    # All 64 shards share the modules and footers that one shard needs.
    _advanced(make_shard, 0).close()
    next(iter(make_shard(0)))
    before = _resident_mib()
    host = _advanced(make_shard, 1)
    mib = (_resident_mib() - before) / _NUM_SHARDS
    host.close()
    return mib


def _resident_mib() -> float:
    # Without the pages of mapped files, which the kernel takes back at will.
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def _in_new_process(function: Callable[[Any], Any], argument: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (argument,))
