"""Suite `data`: tokens a second out of Parquet, beside every peer.

All sides read the same documents (`benchmarks.peers.documents`), in one process each,
without worker processes, in turns; every array is copied once, as on its way to a
device. A ratio is ours over the peer's in the same round. Ours is the pipeline that
`from_config` builds: inputs and targets, each with segmentation and position.

* `packed_parquet_mtok_per_sec`: 64 logical shards of Parquet, joined and cut to rows of
  2048 tokens, in global batches of 64 rows.
* `ratio_grain_interleave`, `ratio_grain_window_shuffle`: the same with Grain's 16-way
  interleave and packer, without and with MaxText's window shuffle of 100 before.
* `ratio_<peer>`, `ratio_<peer>_shuffled`, `ratio_<peer>_fixed_rows`: each other peer,
  in each setting that it does; `fixed_rows` are rows packed beforehand. Two peers do
  less in `packed`: LitData joins documents when it writes, and cuts rows out of a
  mapped file, without marks where a document begins; HF datasets drops the tail of
  every 1000 documents.
* `packed_first_fit_mtok_per_sec`, `packed_best_fit_mtok_per_sec`: documents stay whole;
  `unpacked_mtok_per_sec`: each is padded to a row. Padding counts as tokens here, as
  for the peers.
* `..._per_cpu_sec`, `cpu_ratio_...`: the same by the processor time of all threads.
* `text_...`: from text, see `benchmarks.text`.
* `elastic_overhead_percent`: the same pipelines of 64 shards called in turn by hand,
  without a stream, positions or cursors, against them in the elastic engine; and
  `read_ahead_overhead_percent` likewise, with a thread that is a batch ahead.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import report, text
from benchmarks.peers import measure as sides
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import data_keys, prefetch, rows, sharded_data
from elastic_ckpt.data.lm import pipeline

NUM_SHARDS = 64
_ROUNDS = 5
_OVERHEAD_ROUNDS = 15

_OURS = "ours"
_INPUTS = "inputs"
_RATES: dict[peer.Setting, str] = {
    "packed": "packed_parquet_mtok",
    "packed_shuffled": "packed_shuffled_mtok",
    "packed_first_fit": "packed_first_fit_mtok",
    "packed_best_fit": "packed_best_fit_mtok",
    "unpacked": "unpacked_mtok",
    "fixed_rows": "fixed_rows_mtok",
}
_SUFFIXES: dict[peer.Setting, str] = {
    "packed": "",
    "packed_shuffled": "_shuffled",
    "packed_first_fit": "_first_fit",
    "packed_best_fit": "_best_fit",
    "unpacked": "_unpacked",
    "fixed_rows": "_fixed_rows",
}
_RENAMED: dict[tuple[str, str], str] = {
    ("packed_shuffled", "grain_interleave"): "ratio_grain_window_shuffle",
}
_BOUNDS = {
    "packed_parquet_mtok_per_sec": "at least 20",
    "ratio_grain_interleave": "at least 10",
    "ratio_grain_window_shuffle": "at least 10",
    "ratio_grain_interleave_first_fit": "at least 5",
    "ratio_grain_interleave_best_fit": "at least 5",
    "ratio_hf_datasets_arrow": "at least 1",
    "ratio_hf_datasets_arrow_shuffled": "at least 1",
    "ratio_hf_datasets_arrow_first_fit": "at least 1",
    "ratio_hf_datasets_arrow_best_fit": "at least 1",
    "ratio_hf_datasets_arrow_unpacked": "at least 1",
    "ratio_hf_datasets_arrow_fixed_rows": "at least 1",
    "ratio_lancedb": "at least 3",
    "ratio_lancedb_fixed_rows": "at least 1",
    "ratio_grain_elastic_fixed_rows": "at least 1",
    "ratio_litdata_fixed_rows": "at least 0.5",
}


def measure() -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        figures = _measure(pathlib.Path(directory))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        return figures | text.measure(pathlib.Path(directory) / "text")


def configured(
    files: Sequence[str], *, window: int = 0, packing: str = "concat_then_split"
) -> sharded_data.ShardedData:
    """The pipeline of `from_config` for files that have a column of tokens.

    Args:
      files: Parquet files.
      window: examples shuffled at a time; 0 shuffles none.
      packing: how documents are packed; empty if each is padded, or a row already.
    """
    built = pipeline.from_config(
        data_keys.DataKeys(
            grain_train_files=",".join(files),
            grain_file_type="parquet",
            train_data_columns=COLUMN,
            tokenize_train_data=False,
            num_logical_shards=NUM_SHARDS,
            max_target_length=peer.ROW_LENGTH,
            use_truncation=packing != "concat_then_split",
            packing=bool(packing),
            grain_packing_type=packing or "first_fit",
            grain_shuffle_buffer_size=window,
        )
    )
    assert isinstance(built, sharded_data.ShardedData)
    return built


def _measure(directory: pathlib.Path) -> dict[str, report.Figure]:
    source = Documents(directory=directory / "corpus")
    source.write()
    files = tuple(source.files)
    ours = {
        "packed": configured(files),
        "packed_shuffled": configured(files, window=peer.SHUFFLE_WINDOW),
        "packed_first_fit": configured(files, packing="first_fit"),
        "packed_best_fit": configured(files, packing="best_fit"),
        "unpacked": configured(files, packing=""),
        "fixed_rows": configured(_fixed_rows(source, directory), packing=""),
    }
    figures: dict[str, report.Figure] = {}
    for setting in peer.SETTINGS:
        rates = sides.in_turns(
            [
                sides.Side(name=_OURS, make=_elastic(ours[setting])),
                *sides.sides_of(setting, source=source, directory=directory / "peers"),
            ],
            num_rounds=_ROUNDS,
        )
        figures |= sides.compared(
            rates,
            ours=_OURS,
            name=_RATES[setting],
            ratio=functools.partial(_ratio, setting),
            bounds=_BOUNDS,
        )
        for line in sides.absent(setting):
            print(f"{setting}: {line}")
    return figures | _overhead(ours["packed"])


def _ratio(setting: peer.Setting, name: str) -> str:
    return _RENAMED.get((setting, name), f"ratio_{name}{_SUFFIXES[setting]}")


def _overhead(data: sharded_data.ShardedData) -> dict[str, report.Figure]:
    rates = sides.in_turns(
        [
            sides.Side(name="elastic", make=_elastic(data)),
            sides.Side(name="ahead", make=_elastic(data, read_ahead=1)),
            sides.Side(name="by hand", make=_by_hand(data)),
        ],
        num_tokens=8_000_000,
        num_rounds=_OVERHEAD_ROUNDS,
    )

    def percent(name: str) -> tuple[float, ...]:
        pairs = zip(rates["by hand"].per_sec, rates[name].per_sec, strict=True)
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


def _elastic(
    data: sharded_data.ShardedData, *, read_ahead: int = 0
) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
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
                yield next(batches)[_INPUTS]

    return make


def _by_hand(data: sharded_data.ShardedData) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[Any]:
        pipelines = [iter(data.make_shard(number)) for number in range(NUM_SHARDS)]
        while True:
            drawn = [next(pipeline) for pipeline in pipelines]
            batch = {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
            yield batch[_INPUTS]

    return make


def _fixed_rows(source: Documents, directory: pathlib.Path) -> tuple[str, ...]:
    import pyarrow as pa
    from pyarrow import parquet as pq

    # A row of inputs has a target after each.
    length = peer.ROW_LENGTH + 1
    packed = np.stack(list(source.packed(length)))
    offsets = np.arange(0, packed.size + 1, length, dtype=np.int32)
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
