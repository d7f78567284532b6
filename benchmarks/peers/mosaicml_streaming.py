"""MosaicML Streaming: `StreamingDataset` over local MDS shards of packed rows.

It packs nothing itself: LLM Foundry, its main user, concatenates before it writes MDS.
Rows come through its own `StreamingDataLoader`, unshuffled, from uncompressed shards
of the default size.

Importing it imports torchvision. The registry's torchvision cannot load its compiled
operators beside a CPU build of torch, and then fails where it describes two of them:
so those two are declared first. Nothing here calls them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.documents import COLUMN, Documents
from benchmarks.peers.peer import (
    FITTED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    Peer,
    Setting,
    Tokens,
)

_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # a torch library that is collected takes its operators along


def _prepare(source: Documents, directory: pathlib.Path) -> None:
    _declare_operators()
    import streaming

    columns = {COLUMN: f"ndarray:int32:{ROW_LENGTH}"}
    with streaming.MDSWriter(out=str(directory), columns=columns) as writer:
        for row in source.packed(ROW_LENGTH):
            writer.write({COLUMN: row})


def _rows(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    _declare_operators()
    import streaming

    del setting, source
    dataset = streaming.StreamingDataset(
        local=str(directory), shuffle=False, batch_size=ROWS_A_BATCH
    )
    loader = streaming.StreamingDataLoader(
        dataset, batch_size=ROWS_A_BATCH, num_workers=0
    )
    try:
        for batch in loader:
            yield batch[COLUMN].numpy()
    finally:
        # Only a next epoch ends its threads; left behind, they slow the next side.
        dataset._iterator.exit()


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is None and not _declared:
        library = torch.library.Library("torchvision", "DEF")
        library.define(f"nms{_OPERATOR}")
        library.define(f"qnms{_OPERATOR}")
        _declared.append(library)


MOSAICML_STREAMING = Peer(
    name="mosaicml_streaming",
    packages=("mosaicml-streaming", "torch", "torchvision"),
    lacks=FITTED
    | {
        "packed": "it packs nothing",
        "packed_shuffled": "it packs nothing",
    },
    prepare=_prepare,
    rows=_rows,
)
