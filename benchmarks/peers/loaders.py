"""The loaders of Grain, LanceDB, LitData and MosaicML Streaming.

* `grain_interleave`, Grain's own way to read Parquet: an interleave of 16 files, then
  concat-then-split. `packed_shuffled` puts a `WindowShuffleIterDataset` of 100 between
  the two, like MaxText's default. Grain decodes a whole row group of each file at a
  time.
* `grain_elastic`: Grain's `ElasticIterator` over ArrayRecord, with rows packed
  beforehand. It only accepts datasets with random access, so it has no interleave,
  shuffle window or packing. A record is the bytes of one row; ArrayRecord is written
  with `group_size:1`, which its documentation recommends for random access. Grain reads
  ahead with its default threads.
* `lancedb`: splits of a Lance table, read and packed in threads. `packed` uses its
  `pack_sequences` over 24 splits in table order; this packer puts an
  end-of-document token after each document. `packed_shuffled` shuffles all rows of the
  table by reading at random, because LanceDB has no shuffle window. `fixed_rows` reads
  the rows with a transform that creates NumPy rows without a copy.
* `litdata`: with `TokensLoader`, which cuts rows as it reads. LitData's token format
  joins the documents when it is written, and reading ignores where documents end. So
  `packed` only chooses the row length when it reads, from one mapped file after the
  other, and drops the remainder of each file. Only rows can be shuffled. The writer is
  the one that `litdata.optimize` runs; here it runs without the processes that
  `optimize` starts, whose failures go unnoticed.
* `mosaicml_streaming`: local MDS shards of packed rows. The library itself packs
  nothing: LLM Foundry, its main user, concatenates before it writes MDS. Rows are
  unshuffled, from uncompressed shards of the default size.

The last three stack rows with their own `StreamingDataLoader`.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.documents import COLUMN, END_OF_DOCUMENT, PADDING, Documents
from benchmarks.peers.peer import (
    FITTED,
    PACKED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    SHUFFLE_WINDOW,
    Peer,
    Setting,
    Tokens,
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


_SPLITS = 24
# Splits differ in length: drops everything beyond these blocks and pads nothing.
_BUDGET = 0.95


def _prepare_lancedb(source: Documents, directory: pathlib.Path) -> None:
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


def _lancedb_rows(
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


_CHUNK = "64MB"


def _prepare_litdata(source: Documents, directory: pathlib.Path) -> None:
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


def _litdata_rows(
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


# Importing it imports torchvision. The registry's torchvision cannot load its compiled
# operators with a CPU build of torch and then fails when it describes two of them, so
# these two are declared first. Nothing here calls them.
_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _prepare_mosaicml(source: Documents, directory: pathlib.Path) -> None:
    _declare_operators()
    import streaming

    columns = {COLUMN: f"ndarray:int32:{ROW_LENGTH}"}
    with streaming.MDSWriter(out=str(directory), columns=columns) as writer:
        for row in source.packed(ROW_LENGTH):
            writer.write({COLUMN: row})


def _mosaicml_rows(
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
        # Only another epoch stops its threads, which would slow the next side down.
        dataset._iterator.exit()


@functools.cache
def _declare_operators() -> Any:
    # A torch library that is garbage collected removes its operators.
    import torch

    library = torch.version.cuda is None and torch.library.Library("torchvision", "DEF")
    if library:
        library.define(f"nms{_OPERATOR}")
        library.define(f"qnms{_OPERATOR}")
    return library


PEERS = (
    Peer(
        name="grain_interleave",
        packages=("grain", "pyarrow"),
        lacks={"fixed_rows": "see grain_elastic, which reads at random"},
        prepare=None,
        rows=_interleaved_rows,
    ),
    Peer(
        name="grain_elastic",
        packages=("grain", "array-record"),
        lacks=FITTED | dict.fromkeys(PACKED, "ElasticIterator takes no packer"),
        prepare=_prepare_elastic,
        rows=_elastic_rows,
    ),
    Peer(
        name="mosaicml_streaming",
        packages=("mosaicml-streaming", "torch", "torchvision"),
        lacks=FITTED | dict.fromkeys(PACKED, "it packs nothing"),
        prepare=_prepare_mosaicml,
        rows=_mosaicml_rows,
    ),
    Peer(
        name="litdata",
        packages=("litdata", "torch"),
        lacks=FITTED | {"packed_shuffled": "it shuffles packed rows, not documents"},
        prepare=_prepare_litdata,
        rows=_litdata_rows,
    ),
    Peer(
        name="lancedb",
        packages=("lancedb", "torch", "pyarrow"),
        lacks=FITTED,
        prepare=_prepare_lancedb,
        rows=_lancedb_rows,
    ),
)
