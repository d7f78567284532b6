"""Hugging Face `datasets`: streams Parquet, through torchdata's `StatefulDataLoader`.

There are two peers, because there are two ways to write the same pipeline:

* `hf_datasets` packs like the library's examples: `map(group_texts, batched=True)`
  chains Python lists of 1000 documents and cuts them. Fixed rows are formatted as NumPy
  arrays.
* `hf_datasets_arrow` works on Arrow tables and NumPy arrays, without any Python list.
  It does everything that ours does: inputs, targets one token ahead within each
  document, the number of the document in its row, and the position of each token. Best
  fit is TRL's `pack_dataset`, which sorts 1000 documents by length first; first fit is
  a loop over the documents' lengths, with 16 rows at a time as in Grain.

Both drop or pad the remainder of each 1000 documents, carry nothing over, and lose
their shuffle buffer at a checkpoint. Without shuffling, they read one file after the
other; a shuffle also interleaves the files, and on Arrow tables its window is at least
a row group. The format of fixed rows is Parquet.
"""

from __future__ import annotations

import functools
import gc
import itertools
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers.documents import COLUMN, Documents
from benchmarks.peers.peer import (
    FITTED,
    ROW_LENGTH,
    ROWS_A_BATCH,
    SHUFFLE_WINDOW,
    Peer,
    Setting,
    Tokens,
)

_FILE = "rows.parquet"
_DOCUMENTS_AT_A_TIME = 1000  # the default of `map`
_OPEN_ROWS = 16
_LENGTHS = "seq_lengths"  # of TRL


def _prepare(source: Documents, directory: pathlib.Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory.mkdir(parents=True)
    rows = np.stack(list(source.packed(ROW_LENGTH)))
    pq.write_table(
        pa.table({COLUMN: _cut(pa.array(rows.reshape(-1)))}),
        directory / _FILE,
        row_group_size=source.documents_a_row_group,
    )


def _rows_from_lists(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    if setting == "fixed_rows":
        rows = streamed([str(directory / _FILE)])
        for batch in _loaded(rows.with_format("numpy").batch(ROWS_A_BATCH)):
            yield np.asarray(batch[COLUMN]).astype(np.int32)  # a tensor of int64
        return
    rows = _documents(setting, source).map(
        group_texts, batched=True, batch_size=_DOCUMENTS_AT_A_TIME
    )
    for row in _loaded(rows):
        yield np.asarray(row[COLUMN], np.int32)


def _rows_from_arrow(
    setting: Setting, source: Documents, directory: pathlib.Path
) -> Iterator[Tokens]:
    if setting == "fixed_rows":
        rows = streamed([str(directory / _FILE)]).with_format("arrow")
    elif setting == "packed_best_fit":
        packed = _pack_dataset()(_documents(setting, source), ROW_LENGTH)
        rows = _mapped(packed, _rows_of_packed)
    else:
        rows = _mapped(_documents(setting, source), _TABLES[setting])
    for batch in _loaded(rows.batch(ROWS_A_BATCH)):
        columns = [
            # A single list of 16 lists.
            batch[name].combine_chunks().flatten().flatten().to_numpy()
            for name in batch.column_names
        ]
        for more in columns[1:]:
            more.copy()  # the caller copies the first to count tokens
        yield columns[0].reshape(-1, ROW_LENGTH)


def _mapped(documents: Any, function: Callable[[Any], Any]) -> Any:
    return documents.with_format("arrow").map(
        function, batched=True, batch_size=_DOCUMENTS_AT_A_TIME
    )


def streamed(files: list[str]) -> Any:
    """The records of Parquet files, one file after the other."""
    import datasets

    # Once another peer has imported torchvision, each row would be checked against a
    # video class that torchvision no longer has.
    datasets.config.TORCHVISION_AVAILABLE = False
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True
    )


def _documents(setting: Setting, source: Documents) -> Any:
    documents = streamed(source.files)
    if setting == "packed_shuffled":
        return documents.shuffle(seed=0, buffer_size=SHUFFLE_WINDOW)
    return documents


def _loaded(dataset: Any) -> Iterator[Any]:
    from torchdata import stateful_dataloader

    with warnings.catch_warnings():  # torchdata calls a deprecated function
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader = stateful_dataloader.StatefulDataLoader(
            dataset, batch_size=None, num_workers=0
        )
    try:
        yield from loader
    finally:
        # Arrow's scanner hangs or aborts the process at exit if it outlives an
        # incomplete pass (apache/arrow#45214).
        del loader, dataset
        gc.collect()


def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The function of this name in Transformers' language modeling examples."""
    tokens = list(itertools.chain(*examples[COLUMN]))
    end = len(tokens) // ROW_LENGTH * ROW_LENGTH
    return {COLUMN: [tokens[at : at + ROW_LENGTH] for at in range(0, end, ROW_LENGTH)]}


def _group_tables(documents: Any) -> Any:
    import pyarrow as pa

    column = documents[COLUMN].combine_chunks()
    tokens = column.flatten().to_numpy()
    offsets = column.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    offsets = offsets[np.append(True, np.diff(offsets) > 0)]
    # A document of n tokens has n - 1 inputs, with targets one token ahead.
    is_input, is_target = np.ones((2, len(tokens)), bool)
    is_input[offsets[1:] - 1] = is_target[offsets[:-1]] = False
    inputs, targets = tokens[is_input], tokens[is_target]
    ends = np.cumsum(np.diff(offsets) - 1)
    # Documents are cut into pieces, each in one row.
    row_ends = np.arange(ROW_LENGTH, len(inputs), ROW_LENGTH)
    piece_ends = np.union1d(ends, np.append(row_ends, len(inputs)))
    piece_ends = piece_ends[piece_ends > 0]
    begins = np.append(0, piece_ends[:-1])
    sizes = piece_ends - begins
    row = begins // ROW_LENGTH
    first = np.searchsorted(row, np.arange(row[-1] + 1))
    segments = np.arange(1, len(row) + 1) - first[row]
    segmentation = np.repeat(segments.astype(np.int32), sizes)
    position = np.arange(len(inputs), dtype=np.int32)
    position -= np.repeat(begins.astype(np.int32), sizes)
    return pa.table(
        {
            COLUMN: _cut(pa.array(inputs)),
            "targets": _cut(pa.array(targets)),
            "segmentation": _cut(pa.array(segmentation)),
            "position": _cut(pa.array(position)),
        }
    )


@functools.cache
def _pack_dataset() -> Callable[..., Any]:
    # TRL imports Transformers, which imports torchvision if it is installed; the
    # registry's torchvision is incompatible with a torch without CUDA.
    modules: dict[str, Any] = sys.modules
    torchvision = modules.get("torchvision")
    modules["torchvision"] = None
    try:
        import trl

        return trl.pack_dataset
    finally:
        del modules["torchvision"]
        if torchvision is not None:
            modules["torchvision"] = torchvision


def _fit_tables(documents: Any) -> Any:
    # First fit: a document that fits in no open row closes all open rows.
    columns = _trimmed(documents)
    done: list[list[int]] = []
    open_rows: list[list[int]] = []
    room: list[int] = []
    for document, length in enumerate(columns.value_lengths().to_pylist()):
        row = _first_with(room, length)
        if row == _OPEN_ROWS:
            done += open_rows
            open_rows, room, row = [], [], 0
        if row == len(room):
            open_rows.append([])
            room.append(ROW_LENGTH)
        open_rows[row].append(document)
        room[row] -= length
    return _rows_of(columns, [*done, *open_rows])


def _first_with(room: list[int], length: int) -> int:
    for row, left in enumerate(room):
        if length <= left:
            return row
    return len(room)


def _pad_tables(documents: Any) -> Any:
    column = _trimmed(documents)
    return _rows_of(column, [[document] for document in range(len(column))])


def _trimmed(documents: Any) -> Any:
    import pyarrow.compute as pc

    return pc.list_slice(documents[COLUMN].combine_chunks(), 0, ROW_LENGTH)


def _rows_of(documents: Any, rows: list[list[int]]) -> Any:
    # A table of the documents in each row, as TRL's `pack_dataset` creates it.
    import pyarrow as pa

    taken = documents.take(pa.array(list(itertools.chain(*rows)), pa.int64()))
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    tokens = pa.ListArray.from_arrays(taken.offsets.take(ends), taken.values)
    lengths = pa.ListArray.from_arrays(ends, taken.value_lengths())
    return _rows_of_packed(pa.table({COLUMN: tokens, _LENGTHS: lengths}))


def _rows_of_packed(packed: Any) -> Any:
    import pyarrow as pa

    column, lengths = (packed[name].combine_chunks() for name in (COLUMN, _LENGTHS))
    tokens, sizes = column.flatten().to_numpy(), lengths.flatten().to_numpy()
    ends, documents_a_row = np.cumsum(sizes), lengths.value_lengths().to_numpy()
    targets = np.append(tokens[1:], tokens[:1])
    targets[ends - 1] = 0
    firsts = np.repeat(np.cumsum(documents_a_row) - documents_a_row, documents_a_row)
    segments = np.arange(1, len(sizes) + 1, dtype=np.int32) - firsts.astype(np.int32)
    position = np.arange(len(tokens), dtype=np.int32)
    position -= np.repeat((ends - sizes).astype(np.int32), sizes)
    is_token = np.arange(ROW_LENGTH) < column.value_lengths().to_numpy()[:, None]
    values = {
        COLUMN: tokens,
        "targets": targets,
        "segmentation": np.repeat(segments, sizes),
        "position": position,
    }
    rows = {name: np.zeros(is_token.shape, np.int32) for name in values}
    for name, value in values.items():
        rows[name][is_token] = value
    return pa.table(
        {name: _cut(pa.array(each.reshape(-1))) for name, each in rows.items()}
    )


def _cut(tokens: Any) -> Any:
    # An Arrow array of tokens as an array of token lists; drops the tail.
    import pyarrow as pa

    num_rows = len(tokens) // ROW_LENGTH
    offsets = np.arange(num_rows + 1, dtype=np.int32) * np.int32(ROW_LENGTH)
    return pa.ListArray.from_arrays(offsets, tokens[: num_rows * ROW_LENGTH])


_TABLES: dict[Setting, Callable[[Any], Any]] = {
    "packed": _group_tables,
    "packed_shuffled": _group_tables,
    "packed_first_fit": _fit_tables,
    "unpacked": _pad_tables,
}


_PACKAGES = ("datasets", "torchdata", "torch", "pyarrow")
PEERS = (
    Peer(
        name="hf_datasets",
        packages=_PACKAGES,
        lacks=FITTED,
        prepare=_prepare,
        rows=_rows_from_lists,
    ),
    Peer(
        name="hf_datasets_arrow",
        packages=(*_PACKAGES, "trl"),
        lacks={},
        prepare=_prepare,
        rows=_rows_from_arrow,
    ),
)
