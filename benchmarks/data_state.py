"""Suite `data_state`: what the state of the sharded engine costs, and a resume.

The data is that of the suite `data`: pre-tokenised Parquet, 64 logical shards, joined
and cut to rows of 2048 tokens, here also shuffled in windows of 100.

* `state_bytes_per_shard`: of the cursor files after 300 batches, as `train` writes them
  for one dataset, shuffled; the largest of all packings, trimmed and chunked.
* `resume_64_shards_secs`: from a state in files to the first batch, with no file or
  footer open yet; the slowest of the positions 0, half and end of an epoch, which
  follow.
* `thousand_...`: see `benchmarks.many_datasets`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable

import grain

from benchmarks import data as data_suite
from benchmarks import many_datasets, report, turns
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import cursors, datasets, elastic_data, records, rows
from elastic_ckpt.data.lm import language, pipeline
from elastic_ckpt.data.sharded_data import ShardedData
from elastic_ckpt.data.sources import parquet

_MakeShard = Callable[[int], grain.IterDataset]
_NUM_SHARDS = data_suite.NUM_SHARDS
_PROCESSES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    files: int = 16  # of the corpus
    batches: int = 300  # before the state is taken
    datasets: int = 1000  # of the process that has many


# Shows that the suite runs, and measures nothing.
SMALL = Size(files=2, batches=2, datasets=3)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = pathlib.Path(name)
        source = Documents(directory=directory / "corpus", num_files=size.files)
        source.write()
        make_shard = data_suite.configured(
            grain_train_files=",".join(source.files),
            grain_shuffle_buffer_size=peer.SHUFFLE_WINDOW,
        ).make_shard
        files = tuple(source.files)
        state_bytes = _state_bytes(files, directory / "state", size.batches)
        return {
            **many_datasets.measure(directory / "thousand", num_datasets=size.datasets),
            "state_bytes_per_shard": report.figure("B", "at most 200", [state_bytes]),
            **_resume(make_shard, source, directory),
        }


def _advanced(make_shard: _MakeShard, num_batches: int) -> elastic_data.HostBatches:
    placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=_NUM_SHARDS)
    made = ShardedData(make_shard=make_shard, num_shards=_NUM_SHARDS)
    host = made.host_batches(placement)
    for _ in range(num_batches):
        next(host)
    return host


def _state_bytes(
    files: tuple[str, ...], directory: pathlib.Path, num_batches: int
) -> float:
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
                window=peer.SHUFFLE_WINDOW,
                packing=packing,
            ),
            num_batches,
        )
        to = directory / f"{packing}-{truncate}"
        cursors.write(to, host.shard_cursors(), host.position())
        num_bytes = sum(path.stat().st_size for path in to.iterdir())
        largest = max(largest, num_bytes / _NUM_SHARDS)
        host.close()
    return largest


def _resume(
    make_shard: _MakeShard, source: Documents, directory: pathlib.Path
) -> dict[str, report.Figure]:
    epoch = source.num_tokens // peer.ROW_LENGTH // _NUM_SHARDS
    figures = {}
    for place, num_batches in {"0": 0, "half": epoch // 2, "end": epoch - 1}.items():
        host = _advanced(make_shard, num_batches)
        to = directory / f"resume-{place}"
        position = host.position()
        cursors.write(to, host.shard_cursors(), position)
        host.close()
        # A position is JSON, as it is stored.
        state = (make_shard, str(to), json.dumps(position))
        figures[f"resume_64_shards_secs_at_{place}"] = report.figure(
            "s",
            f"below 1, at position {place} of an epoch",
            [turns.in_new_process(_resume_secs, *state) for _ in range(_PROCESSES)],
        )
    slowest = max(figures.values(), key=lambda figure: figure.value)
    return {"resume_64_shards_secs": slowest} | figures


def _resume_secs(make_shard: _MakeShard, directory: str, text: str) -> float:
    position = json.loads(text)
    began = time.perf_counter()
    host = _advanced(make_shard, 0)
    host.go_to(position, lambda shards: cursors.read(directory, shards, position))
    next(host)
    secs = time.perf_counter() - began
    host.close()
    return secs
