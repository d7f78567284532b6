"""Grain's own way to read Parquet: an interleave of 16 files, then concat-then-split.

`packed_shuffled` puts a `WindowShuffleIterDataset` of 100 between the two, the default
of MaxText. Grain decodes a whole row group of each file at a time.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.documents import COLUMN, Documents
from benchmarks.peers.peer import (
    ROW_LENGTH,
    SHUFFLE_WINDOW,
    Peer,
    Setting,
    Tokens,
    prepare_nothing,
)

_FILES_AT_A_TIME = 16
_BINS = 16


def _rows(
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
        packer = (
            experimental.FirstFitPackIterDataset
            if setting == "packed_first_fit"
            else experimental.BestFitPackIterDataset
        )
        rows = packer(documents, length_struct=lengths, num_packing_bins=_BINS)
    else:
        rows = experimental.ConcatThenSplitIterDataset(documents, length_struct=lengths)
    packed = iter(rows)
    try:
        for row in packed:
            yield row[COLUMN]
    finally:
        packed.close()


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
    rows=_rows,
)
