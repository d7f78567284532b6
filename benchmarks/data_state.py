"""Suite `data_state`: what the state of the sharded engine costs.

The data is that of the suite `data`: pre-tokenised Parquet, 64 logical shards, joined
and cut to rows of 2048 tokens, here also shuffled in windows of 100.

* `state_bytes_per_shard`: of the cursor files after 300 batches, as `train` writes them
  for one dataset, shuffled; the largest of all packings, trimmed and chunked.
* `thousand_...`: see `benchmarks.many_datasets`.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile

from benchmarks import data as data_suite
from benchmarks import many_datasets, report
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import cursors, datasets, records, rows
from elastic_ckpt.data.lm import language, pipeline
from elastic_ckpt.data.sharded_data import ShardedData
from elastic_ckpt.data.sources import parquet

_NUM_SHARDS = data_suite.NUM_SHARDS


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
        state_bytes = _state_bytes(
            tuple(source.files), directory / "state", size.batches
        )
        return {
            **many_datasets.measure(directory / "thousand", num_datasets=size.datasets),
            "state_bytes_per_shard": report.figure("B", "at most 200", [state_bytes]),
        }


def _state_bytes(
    files: tuple[str, ...], directory: pathlib.Path, num_batches: int
) -> float:
    largest = 0.0
    placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=_NUM_SHARDS)
    only = pipeline.Part(
        name=datasets.ONLY,
        source=parquet.Parquet(files=files, columns=(COLUMN,)),
        weight=1.0,
    )
    for packing, truncate in itertools.product(("", *language.PACKINGS), (True, False)):
        make_shard = pipeline.LanguagePipeline(
            parts=(only,),
            num_shards=_NUM_SHARDS,
            reading=records.ReadOptions(shuffle_seed=0),
            documents=language.Documents(column=COLUMN, tokenizer=None),
            length=512,
            truncate=truncate,
            window=peer.SHUFFLE_WINDOW,
            packing=packing,
        )
        made = ShardedData(make_shard=make_shard, num_shards=_NUM_SHARDS)
        host = made.host_batches(placement)
        for _ in range(num_batches):
            next(host)
        to = directory / f"{packing}-{truncate}"
        cursors.write(to, host.shard_cursors(), host.position())
        num_bytes = sum(path.stat().st_size for path in to.iterdir())
        largest = max(largest, num_bytes / _NUM_SHARDS)
        host.close()
    return largest
