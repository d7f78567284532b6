"""Grain, in two ways.

* `grain_interleave`, its own way to read Parquet: an interleave of 16 files, then
  concat-then-split. `packed_shuffled` puts a `WindowShuffleIterDataset` of 100 between
  the two, the default of MaxText. Grain decodes a whole row group of each file at a
  time.
* `grain_elastic`: its `ElasticIterator` over ArrayRecord, of rows that are packed
  beforehand. It takes only datasets with random access, so no interleave, shuffle
  window or packing. A record is the bytes of one row; ArrayRecord is written with
  `group_size:1`, which its documentation recommends for random access. Grain reads
  ahead with its default threads.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.documents import COLUMN, Documents
from benchmarks.peers.peer import (
    FITTED,
    PACKED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    SHUFFLE_WINDOW,
    Peer,
    Setting,
    Tokens,
    prepare_nothing,
)

_FILES_AT_A_TIME = 16
_BINS = 16


def _interleaved_rows(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    from grain import experimental

    del directory  # Grain reads the corpus itself
    documents = experimental.InterleaveIterDataset(
        [experimental.ParquetIterDataset(path) for path in source.files],
        cycle_length=_FILES_AT_A_TIME,
    )
    if setting == "packed_shuffled":
        documents = experimental.WindowShuffleIterDataset(
            documents, window_size=SHUFFLE_WINDOW, seed=0
        )
    lengths = {COLUMN: ROW_LENGTH}
    if setting in ("packed_first_fit", "packed_best_fit", "unpacked"):
        documents = documents.map(_trimmed)
    if setting == "unpacked":
        rows = documents.map(_padded)
    elif setting in ("packed_first_fit", "packed_best_fit"):
        packer = experimental.BestFitPackIterDataset
        if setting == "packed_first_fit":
            packer = experimental.FirstFitPackIterDataset
        rows = packer(documents, length_struct=lengths, num_packing_bins=_BINS)
    else:
        rows = experimental.ConcatThenSplitIterDataset(documents, length_struct=lengths)
    packed = iter(rows)
    with contextlib.closing(packed):
        for row in packed:
            yield row[COLUMN]


def _trimmed(document: dict[str, Any]) -> dict[str, np.ndarray]:
    return {COLUMN: np.asarray(document[COLUMN][:ROW_LENGTH])}


def _padded(document: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tokens = document[COLUMN]
    return {COLUMN: np.pad(tokens, (0, ROW_LENGTH - len(tokens)))}


GRAIN_INTERLEAVE = Peer(
    name="grain_interleave",
    packages=("grain", "pyarrow"),
    lacks={"fixed_rows": "see grain_elastic, which reads at random"},
    prepare=prepare_nothing,
    rows=_interleaved_rows,
)


_FILE = "rows.array_record"


def _prepare_elastic(source: Documents, directory: pathlib.Path) -> None:
    from array_record.python import array_record_module

    directory.mkdir(parents=True)
    path = str(directory / _FILE)
    with contextlib.closing(
        array_record_module.ArrayRecordWriter(path, "group_size:1")
    ) as writer:
        for row in source.packed(ROW_LENGTH):
            writer.write(row.tobytes())


def _elastic_rows(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    import grain

    del setting, source
    records = grain.sources.ArrayRecordDataSource(str(directory / _FILE))
    batches = iter(
        grain.experimental.ElasticIterator(
            grain.MapDataset.source(records).map(_decoded),
            ROWS_A_BATCH,
            grain.sharding.ShardOptions(shard_index=0, shard_count=1),
        )
    )
    with contextlib.closing(batches):
        yield from batches


def _decoded(record: bytes) -> Tokens:
    return np.frombuffer(record, np.int32)


GRAIN_ELASTIC = Peer(
    name="grain_elastic",
    packages=("grain", "array-record"),
    lacks=FITTED | dict.fromkeys(PACKED, "ElasticIterator takes no packer"),
    prepare=_prepare_elastic,
    rows=_elastic_rows,
)
