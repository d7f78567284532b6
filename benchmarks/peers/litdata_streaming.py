"""LitData: `StreamingDataset` with `TokensLoader`, which cuts rows as it reads.

Its format for tokens joins the documents when they are written, and reading does not
look where they end. So `packed` only chooses the length of a row when it reads, from
one mapped file after the other, and drops what is left at the end of each. Nothing can
be shuffled but rows. `fixed_rows` reads rows packed beforehand, from the same format,
and stacks them by its own `StreamingDataLoader`.

The writer is the one that `litdata.optimize` runs; it runs here without the processes
that `optimize` starts, whose failures go unnoticed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from benchmarks.peers.documents import Documents
from benchmarks.peers.peer import (
    FITTED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    Peer,
    Setting,
    Tokens,
)

_CHUNK = "64MB"


def _prepare(source: Documents, directory: pathlib.Path) -> None:
    import litdata
    from litdata.streaming import writer

    sequences = {
        "packed": source.documents(),
        "fixed_rows": source.packed(ROW_LENGTH),
    }
    for setting, written in sequences.items():
        chunks = writer.BinaryWriter(
            str(directory / setting),
            chunk_bytes=_CHUNK,
            item_loader=litdata.TokensLoader(),
        )
        for index, tokens in enumerate(written):
            chunks[index] = tokens
        chunks.done()
        chunks.merge()


def _rows(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    import litdata

    del source
    dataset = litdata.StreamingDataset(
        str(directory / setting), item_loader=litdata.TokensLoader(ROW_LENGTH)
    )
    if setting == "packed":
        yield from dataset
        return
    for batch in litdata.StreamingDataLoader(
        dataset, batch_size=ROWS_A_BATCH, num_workers=0
    ):
        yield batch.numpy()


LITDATA = Peer(
    name="litdata",
    packages=("litdata", "torch"),
    lacks=FITTED | {"packed_shuffled": "it shuffles packed rows, not documents"},
    prepare=_prepare,
    rows=_rows,
)
