"""LanceDB's `StreamingDataset`: splits of a Lance table, read and packed in threads.

`packed` uses its own `pack_sequences` over 24 splits in the order of the table; its
packer puts an end-of-document token after each document. `packed_shuffled` shuffles all
rows of the table, for it has no window: it reads at random instead.
`fixed_rows` takes the rows with a transform that makes NumPy rows without a copy, and
stacks them by its own `StreamingDataLoader`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.documents import COLUMN, END_OF_DOCUMENT, PADDING, Documents
from benchmarks.peers.peer import (
    FITTED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    Peer,
    Setting,
    Tokens,
)

_SPLITS = 24
# Splits are not equally long: what is beyond these blocks is left out, none is padded.
_BUDGET = 0.95


def _prepare(source: Documents, directory: pathlib.Path) -> None:
    import lancedb
    import pyarrow as pa
    import pyarrow.dataset

    database = lancedb.connect(directory)
    database.create_table(
        "documents", pyarrow.dataset.dataset(source.files).scanner().to_reader()
    )
    schema = pa.schema({COLUMN: pa.list_(pa.int32(), ROW_LENGTH)})
    database.create_table("rows", _record_batches(source, schema), schema=schema)


def _record_batches(source: Documents, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    rows = np.stack(list(source.packed(ROW_LENGTH)))
    for some in np.array_split(rows, source.num_files):
        column = pa.FixedSizeListArray.from_arrays(some.reshape(-1), ROW_LENGTH)
        yield pa.record_batch([column], schema=schema)


def _rows(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    import lancedb
    from lancedb import streaming

    database = lancedb.connect(directory)
    if setting == "fixed_rows":
        dataset = streaming.StreamingDataset(
            database.open_table("rows"),
            num_splits=_SPLITS,
            shuffle=False,
            columns=[COLUMN],
            transform=_unstacked,
        )
        loader = streaming.StreamingDataLoader(
            dataset, batch_size=ROWS_A_BATCH, collate_fn=np.stack
        )
        yield from loader
        return
    blocks = int(_BUDGET * source.num_tokens / ROW_LENGTH)
    dataset = streaming.StreamingDataset(
        database.open_table("documents"),
        num_splits=_SPLITS,
        shuffle=setting == "packed_shuffled",
        columns=[COLUMN],
        pack_sequences=ROW_LENGTH,
        eos_id=END_OF_DOCUMENT,
        pad_id=PADDING,
        blocks_per_epoch=blocks - blocks % _SPLITS,
    )
    for block in dataset:
        yield block["input_ids"].numpy().astype(np.int32)


def _unstacked(batch: Any) -> list[Tokens]:
    return list(batch.column(0).flatten().to_numpy().reshape(-1, ROW_LENGTH))


LANCEDB = Peer(
    name="lancedb",
    packages=("lancedb", "torch", "pyarrow"),
    lacks=FITTED,
    prepare=_prepare,
    rows=_rows,
)
