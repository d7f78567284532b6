"""Grain's `ElasticIterator` over ArrayRecord: the rows are packed beforehand.

It takes only datasets with random access, so no interleave, shuffle window or packing.
A record is the bytes of one row; ArrayRecord is written with `group_size:1`, which its
documentation recommends for random access. Grain reads ahead with its default threads.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from benchmarks.peers.documents import Documents
from benchmarks.peers.peer import (
    FITTED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    Peer,
    Setting,
    Tokens,
)

_FILE = "rows.array_record"


def _prepare(source: Documents, directory: pathlib.Path) -> None:
    from array_record.python import array_record_module

    directory.mkdir(parents=True)
    writer = array_record_module.ArrayRecordWriter(
        str(directory / _FILE), "group_size:1"
    )
    for row in source.packed(ROW_LENGTH):
        writer.write(row.tobytes())
    writer.close()


def _rows(
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
    try:
        yield from batches
    finally:
        batches.close()


def _decoded(record: bytes) -> Tokens:
    return np.frombuffer(record, np.int32)


GRAIN_ELASTIC = Peer(
    name="grain_elastic",
    packages=("grain", "array-record"),
    lacks=FITTED
    | {
        "packed": "ElasticIterator takes no packer",
        "packed_shuffled": "ElasticIterator takes no packer",
    },
    prepare=_prepare,
    rows=_rows,
)
