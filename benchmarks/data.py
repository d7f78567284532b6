"""Suite `data`: tokens per second from Parquet, compared with every peer.

All sides read the same documents (`benchmarks.peers.documents`), in one process each,
without worker processes, taking turns; every array is copied once, as on its way to a
device. A ratio is our rate over the peer's rate in the same round. Our side is the
pipeline that `from_config` builds: inputs and targets, each with segmentation and
position.

* `packed_parquet_mtok_per_sec`: 64 logical shards of Parquet, joined and cut to rows of
  2048 tokens, in global batches of 64 rows.
* `ratio_grain_interleave`, `ratio_grain_window_shuffle`: relative to Grain's 16-way
  interleave and packer, without and with MaxText's preceding window shuffle of 100.
* `ratio_<peer>`, `ratio_<peer>_shuffled`, `ratio_<peer>_fixed_rows`: relative to each
  other peer, in each setting that the peer supports; `fixed_rows` are rows packed
  beforehand. Two peers do less in `packed`: LitData joins documents when it writes and
  cuts rows out of a mapped file, without marking where documents begin; HF datasets
  drops the tail of every 1000 documents.
* `packed_first_fit_mtok_per_sec`, `packed_best_fit_mtok_per_sec`: documents stay whole;
  `unpacked_mtok_per_sec`: each document is padded to a row. Padding counts as tokens
  here, as it does for the peers.
* `..._per_cpu_sec`, `cpu_ratio_...`: the same, by the processor time of all threads.
* `text_...`: from text, see `benchmarks.text`.
* `elastic_overhead_percent`: the overhead of the elastic engine over the same pipelines
  of 64 shards, called by hand in round-robin order, without a stream, positions or
  cursors.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import report, sized, text
from benchmarks.peers import measure as peers
from benchmarks.peers import peer
from benchmarks.peers.documents import COLUMN, Documents
from elastic_ckpt.data import prefetch, sharded_data
from elastic_ckpt.data.lm import pipeline

NUM_SHARDS = 64
_ROUNDS = sized(5, 1)
# The tokens timed for each side in each round, and the tokens before that.
_NUM_TOKENS = sized(16_000_000, 1_000_000)
# By then, our side is a few million tokens ahead, as it is later.
_WARM_UP_TOKENS = sized(4_000_000, 1_000_000)

# How our side packs in each setting.
_SETTINGS: dict[peer.Setting, dict[str, Any]] = {
    "packed": {},
    "packed_shuffled": {"grain_shuffle_buffer_size": peer.SHUFFLE_WINDOW},
    "packed_first_fit": {"grain_packing_type": "first_fit"},
    "packed_best_fit": {"grain_packing_type": "best_fit"},
    "unpacked": {"packing": False},
    "fixed_rows": {"packing": False},
}
_RENAMED = {"ratio_grain_interleave_shuffled": "ratio_grain_window_shuffle"}


def _ratio(name: str, setting: peer.Setting) -> str:
    # The name of the figure for the ratio to a peer.
    ending = "" if setting == "packed" else f"_{setting.removeprefix('packed_')}"
    named = f"ratio_{name}{ending}"
    return _RENAMED.get(named, named)


_BOUNDS = {
    "packed_parquet_mtok_per_sec": "at least 20",
    "ratio_grain_interleave": "at least 10",
    "ratio_grain_window_shuffle": "at least 10",
    "ratio_grain_interleave_first_fit": "at least 5",
    "ratio_grain_interleave_best_fit": "at least 5",
    **{_ratio("hf_datasets_arrow", each): "at least 1" for each in _SETTINGS},
    "ratio_lancedb": "at least 3",
    "ratio_lancedb_fixed_rows": "at least 1",
    "ratio_grain_elastic_fixed_rows": "at least 1",
    "ratio_litdata_fixed_rows": "at least 0.5",
}


def measure() -> dict[str, report.Figure]:
    """Runs the suite, with its files on the RAM disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        figures = _of_rows(pathlib.Path(directory))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        return figures | text.measure(pathlib.Path(directory))


def configured(**more: Any) -> sharded_data.ShardedData:
    """The pipeline of `from_config` for Parquet files with a token column.

    Unless its keys say otherwise, 64 shards are joined and cut to rows, in the order of
    the files.
    """
    keys = {
        "grain_file_type": "parquet",
        "train_data_columns": COLUMN,
        "tokenize_train_data": False,
        "num_logical_shards": NUM_SHARDS,
        "max_target_length": peer.ROW_LENGTH,
        "packing": True,
        "grain_packing_type": "concat_then_split",
        "grain_shuffle_buffer_size": 0,
        **more,
    }
    is_cut = keys["packing"] and keys["grain_packing_type"] == "concat_then_split"
    built = pipeline.from_config(keys | {"use_truncation": not is_cut})
    assert isinstance(built, sharded_data.ShardedData)
    return built


def _of_rows(directory: pathlib.Path) -> dict[str, report.Figure]:
    source = Documents(directory=directory / "corpus")
    source.write()
    corpus = ",".join(source.files)
    figures: dict[str, report.Figure] = {}
    for setting, keys in _SETTINGS.items():
        files = corpus if setting != "fixed_rows" else _fixed_rows(source, directory)
        data = configured(grain_train_files=files, **keys)
        sides = {"ours": functools.partial(text.inputs, data, prefetch.IN_CALLER)}
        sides |= peers.sides_of(setting, source, directory / "peers")
        rates = peers.in_turns(
            sides,
            num_tokens=_NUM_TOKENS,
            warm_up_tokens=_WARM_UP_TOKENS,
            num_rounds=_ROUNDS,
        )
        figures |= peers.compared(
            rates,
            name="packed_parquet_mtok" if setting == "packed" else f"{setting}_mtok",
            ratio=functools.partial(_ratio, setting=setting),
            bounds=_BOUNDS,
        )
    data = configured(grain_train_files=corpus)
    rates = peers.in_turns(
        {
            "elastic": functools.partial(text.inputs, data, prefetch.IN_CALLER),
            "by hand": functools.partial(_by_hand, data),
        },
        num_tokens=_NUM_TOKENS // 2,
        warm_up_tokens=_WARM_UP_TOKENS,
        num_rounds=3 * _ROUNDS,
    )
    pairs = zip(rates["by hand"]["per_sec"], rates["elastic"]["per_sec"], strict=True)
    return figures | {
        "elastic_overhead_percent": report.figure(
            "%",
            "at most 5; over the same 64 pipelines called by hand",
            [100 * (bare / elastic - 1) for bare, elastic in pairs],
        )
    }


def _by_hand(data: sharded_data.ShardedData) -> Iterator[Any]:
    pipelines = [iter(data.make_shard(number)) for number in range(NUM_SHARDS)]
    while True:
        drawn = [next(pipeline) for pipeline in pipelines]
        batch = {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
        yield batch["inputs"]


def _fixed_rows(source: Documents, directory: pathlib.Path) -> str:
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
        # Memory-mapped tokens, as in the peers' own formats.
        compression="none",
        use_dictionary=False,
    )
    return str(path)
