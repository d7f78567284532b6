"""Suite `data`: tokens a second out of pre-tokenised Parquet, beside every peer.

All sides read the same documents (`benchmarks.peers.documents`), in one process each,
without worker processes, in turns; every array is copied once, as on its way to a
device. A ratio is ours over the peer's in the same round.

* `packed_parquet_mtok_per_sec`: 64 logical shards of Parquet, joined and cut to rows of
  2048 tokens, in global batches of 64 rows.
* `ratio_grain_interleave`, `ratio_grain_window_shuffle`: the same with Grain's 16-way
  interleave and packer, without and with MaxText's window shuffle of 100 before.
* `ratio_<peer>`, `ratio_<peer>_shuffled`, `ratio_<peer>_fixed_rows`: each other peer,
  in each setting that it does; `fixed_rows` are rows packed beforehand. Two peers do
  less in `packed`: LitData joins documents when it writes, and cuts rows out of a
  mapped file; HF datasets over Arrow tables drops the tail of every 1000 documents.
  Neither says where a document begins.
* `elastic_overhead_percent`: the same pipelines of 64 shards called in turn by hand,
  without a stream, positions or cursors, against them in the elastic engine; and
  `read_ahead_overhead_percent` likewise, with a thread that is a batch ahead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from benchmarks import report
from benchmarks.peers import measure as sides
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import packing, prefetch, records, rows, shuffling
from elastic_ckpt.data.sharded_data import ShardedData
from elastic_ckpt.data.sources import parquet

NUM_SHARDS = 64
_ROUNDS = 5
_OVERHEAD_ROUNDS = 15

_OURS = "ours"
_RATES: dict[peer.Setting, str] = {
    "packed": "packed_parquet_mtok_per_sec",
    "packed_shuffled": "packed_shuffled_mtok_per_sec",
    "fixed_rows": "fixed_rows_mtok_per_sec",
}
_SUFFIXES: dict[peer.Setting, str] = {
    "packed": "",
    "packed_shuffled": "_shuffled",
    "fixed_rows": "_fixed_rows",
}
_RENAMED: dict[tuple[str, str], str] = {
    ("packed_shuffled", "grain_interleave"): "ratio_grain_window_shuffle",
}
_BOUNDS = {
    "packed": "at least 20",
    "ratio_grain_interleave": "at least 3",
    "ratio_grain_window_shuffle": "at least 10",
    "ratio_lancedb": "at least 7",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The pipeline of a shard: Parquet, perhaps a window shuffle, perhaps packed.

    Attributes:
      files: Parquet files with a column of tokens.
      window: examples shuffled at a time; 0 shuffles none.
      packed: whether documents are packed; if not, they are rows already.
    """

    files: tuple[str, ...]
    window: int = 0
    packed: bool = True

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of `shard`."""
        found: grain.IterDataset = records.Records(
            parquet.Parquet(files=self.files, columns=(COLUMN,)),
            shard=shard,
            num_shards=NUM_SHARDS,
            reading=records.Reading(shuffle_seed=0),
        )
        if self.window:
            found = shuffling.WindowShuffle(found, window_size=self.window, seed=shard)
        if self.packed:
            return packing.ConcatThenSplit(
                found, features=(COLUMN,), length=peer.ROW_LENGTH
            )
        return found


def measure() -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        return _measure(pathlib.Path(directory))


def _measure(directory: pathlib.Path) -> dict[str, report.Figure]:
    source = Documents(directory=directory / "corpus")
    source.write()
    files = tuple(source.files)
    ours = {
        "packed": Shard(files=files),
        "packed_shuffled": Shard(files=files, window=peer.SHUFFLE_WINDOW),
        "fixed_rows": Shard(files=_fixed_rows(source, directory), packed=False),
    }
    figures: dict[str, report.Figure] = {}
    for setting in peer.SETTINGS:
        samples = sides.in_turns(
            [
                sides.Side(name=_OURS, make=_elastic(ours[setting])),
                *sides.sides_of(setting, source=source, directory=directory / "peers"),
            ],
            num_rounds=_ROUNDS,
        )
        figures |= _figures(setting, samples)
        for line in sides.absent(setting):
            print(f"{setting}: {line}")
    return figures | _overhead(ours["packed"])


def _figures(
    setting: peer.Setting, samples: dict[str, tuple[float, ...]]
) -> dict[str, report.Figure]:
    own = samples.pop(_OURS)
    rate = report.Figure(
        unit="Mtok/s", against=_BOUNDS.get(setting, "no bound"), samples=own
    )
    figures = {_RATES[setting]: rate}
    for name, theirs in samples.items():
        ratio = _RENAMED.get((setting, name), f"ratio_{name}{_SUFFIXES[setting]}")
        rate = statistics.median(theirs)
        figures[ratio] = report.Figure(
            unit="ratio",
            against=f"{_BOUNDS.get(ratio, 'ahead')}; {name}: {rate:.2f} Mtok/s",
            samples=tuple(a / b for a, b in zip(own, theirs, strict=True)),
        )
    return figures


def _overhead(shard: Shard) -> dict[str, report.Figure]:
    samples = sides.in_turns(
        [
            sides.Side(name="elastic", make=_elastic(shard)),
            sides.Side(name="ahead", make=_elastic(shard, read_ahead=1)),
            sides.Side(name="by hand", make=_by_hand(shard)),
        ],
        num_tokens=8_000_000,
        num_rounds=_OVERHEAD_ROUNDS,
    )

    def percent(name: str) -> tuple[float, ...]:
        pairs = zip(samples["by hand"], samples[name], strict=True)
        return tuple(100 * (bare / elastic - 1) for bare, elastic in pairs)

    against = "the same 64 pipelines called in turn by hand"
    return {
        "elastic_overhead_percent": report.Figure(
            unit="%", against=f"at most 5; {against}", samples=percent("elastic")
        ),
        "read_ahead_overhead_percent": report.Figure(
            unit="%", against=f"a thread ahead, to {against}", samples=percent("ahead")
        ),
    }


def _elastic(shard: Shard, *, read_ahead: int = 0) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        data = ShardedData(make_shard=shard, num_shards=NUM_SHARDS)
        placement = rows.Placement.in_order(
            0, num_hosts=1, global_batch_size=NUM_SHARDS
        )
        rows_of_host = prefetch.Prefetched(
            data.host_batches(placement),
            make=dict,
            read_ahead=prefetch.ReadAhead(batches=read_ahead),
        )
        with contextlib.closing(rows_of_host) as batches:
            while True:
                yield next(batches)[COLUMN]

    return make


def _by_hand(shard: Shard) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        pipelines = [iter(shard(number)) for number in range(NUM_SHARDS)]
        while True:
            drawn = [next(pipeline) for pipeline in pipelines]
            batch = {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
            yield batch[COLUMN]

    return make


def _fixed_rows(source: Documents, directory: pathlib.Path) -> tuple[str, ...]:
    import pyarrow as pa
    from pyarrow import parquet as pq

    packed = np.stack(list(source.packed(peer.ROW_LENGTH)))
    offsets = np.arange(0, packed.size + 1, peer.ROW_LENGTH, dtype=np.int32)
    column = pa.ListArray.from_arrays(offsets, packed.reshape(-1))
    path = directory / "fixed_rows.parquet"
    pq.write_table(
        pa.table({COLUMN: column}),
        path,
        row_group_size=256,
        # Tokens that are mapped, as those of the peers' own formats are.
        compression="none",
        use_dictionary=False,
    )
    return (str(path),)
