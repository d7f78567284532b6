"""Parquet files: small row groups are decoded whole, others a little at a time.

Between its turns a shard holds what it has decoded last, at most 2 MiB, and an open
file. Shards that read small parts of the same row group share it decoded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import digest, errors, extras, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import arrow_rows, files, kept_blocks, source

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# The decoded size of a shard's batch.
_BATCH_BYTES = 256 * 1024
# A smaller row group is decoded as a whole. That costs less than holding a page while
# other shards read.
_SMALL_BYTES = 2 * 1024 * 1024
# The size of a read from a column chunk.
_BUFFER_BYTES = 64 * 1024
# The size of a decoded number of each type in bytes.
_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
# Begins and ends a file; before it is the length of the footer at the end.
_MAGIC = b"PAR1"
_TAIL_BYTES = 8
_CHUNK_BYTES = 2**20
# The most open row groups in a process.
_MAX_OPEN = 256
# From this number of parts on, shards share the table of a row group.
_SHARED_PARTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(kept_blocks.BlockFiles):
    """Parquet files as a source; a block is a row group.

    An element has the value of each column by name: lists of numbers as read-only NumPy
    arrays, text as `str`, other values as Arrow converts them to Python; None if there
    is no value.

    Attributes:
      files: the paths or URIs of the files.
      columns: the columns to read; all if it is empty.
    """

    file_type = "parquet"
    _block_name = "row group"

    def index(self, file: str) -> source.FileIndex:
        """The rows of each row group, from the file's footer."""
        metadata = _metadata(file)
        names = metadata.schema.to_arrow_schema().names
        source.check_columns(file, self.columns, names)
        footer = _footer(file, metadata)
        groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
        starts = [_begin_bytes(group.column(0)) for group in groups]
        return source.FileIndex(
            content=files.content(file).including(digest.bytes_digest(footer)),
            block_records=np.array([group.num_rows for group in groups], np.int64),
            block_bytes=() if self.columns else tuple(starts),
        )

    def _batch(self, unit: units.Unit) -> pa.RecordBatch:
        """See `BlockFiles`."""
        with (
            arrow_rows.damaged(),
            _open(self.files[unit.file], buffered=False) as opened,
        ):
            table = opened.read_row_group(
                unit.block, columns=list(self.columns) or None, use_threads=False
            )
        if table.num_rows != unit.block_records:
            raise arrow_rows.DamagedError("not as many rows as in the footer")
        return arrow_rows.sound(_joined(table))

    def _stream(self, unit: units.Unit, row: int) -> Iterator[pa.RecordBatch]:
        """See `BlockFiles`."""
        if _row_group_bytes(self, unit) <= _SMALL_BYTES:
            batch = functools.partial(self._batch, unit)
            yield files.retried(batch, self.place(unit)).slice(row)
            return
        rows = _OpenRows(self, unit, row)
        while True:
            yield files.retried(rows.next, self.place(unit))

    def _is_shared(self, unit: units.Unit) -> bool:
        """See `BlockFiles`.

        It is cheaper to decode the row group once and keep it than to decode the rows
        before a small part in each shard.
        """
        is_small_part = unit.num_records * _SHARED_PARTS <= unit.block_records
        budget = kept_blocks.BUDGET_BYTES
        return is_small_part and _row_group_bytes(self, unit) <= budget


class _OpenRows:
    """A row group, read from a row on; it may be closed between two batches.

    Args:
      parquet: the files.
      unit: in the row group.
      row: the first to be read.
    """

    def __init__(self, parquet: Parquet, unit: units.Unit, row: int) -> None:
        self._parquet, self._unit, self._row = parquet, unit, row

    def next(self) -> pa.RecordBatch:
        """The next rows, at least one; may be tried again."""
        with _OPEN_LOCK:
            batches = _OPEN.pop(self, None)
        if batches is None:
            batches = _streamed(self._parquet, self._unit, self._row)
        with arrow_rows.damaged():
            batch = next(batches, None)
        if batch is None:
            raise arrow_rows.DamagedError("fewer rows than in the footer")
        self._row += batch.num_rows
        with _OPEN_LOCK:
            _OPEN[self] = batches
            while len(_OPEN) > _MAX_OPEN:
                _OPEN.pop(next(iter(_OPEN)))
        return batch


# The open row groups, the least recently used first.
_OPEN_LOCK = threading.Lock()
_OPEN: weakref.WeakKeyDictionary[_OpenRows, Iterator[pa.RecordBatch]]
_OPEN = weakref.WeakKeyDictionary()


def _streamed(parquet: Parquet, unit: units.Unit, row: int) -> Iterator[pa.RecordBatch]:
    num_batches = -(-_row_group_bytes(parquet, unit) // _BATCH_BYTES)
    with _open(parquet.files[unit.file], buffered=True) as opened:
        for batch in opened.iter_batches(
            batch_size=-(-unit.block_records // num_batches),
            row_groups=[unit.block],
            columns=list(parquet.columns) or None,
            use_threads=False,
        ):
            if row < batch.num_rows:
                yield arrow_rows.sound(batch).slice(row)
            row = max(0, row - batch.num_rows)


def _joined(table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        # More than 2 GiB of text do not fit into one array of the usual type.
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
        fields = [f.with_type(large.get(f.type, f.type)) for f in table.schema]
        batches = table.cast(pa.schema(fields)).combine_chunks().to_batches()
    (batch,) = batches
    return batch


@contextlib.contextmanager
def _open(file: str, *, buffered: bool) -> Iterator[pq.ParquetFile]:
    # A memory-mapped local file needs neither buffers nor copies.
    local = storage.is_local(file)
    with (
        contextlib.nullcontext(file) if local else files.opened(file) as stream,
        library().ParquetFile(
            stream,
            memory_map=local,
            metadata=_metadata(file),
            buffer_size=_BUFFER_BYTES if buffered and not local else 0,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as opened,
    ):
        yield opened


@functools.lru_cache(maxsize=1024)
def _metadata(file: str) -> pq.FileMetaData:
    def foreign(problem: object) -> errors.DataError:
        return errors.DataError(
            f"{file}: not a complete Parquet file ({problem}); {files.RESTORE}"
        )

    read_metadata = library().read_metadata
    with files.opened(file) as stream, arrow_rows.damaged(foreign):
        return read_metadata(stream)


files.register_cache(_metadata.cache_clear)


def _footer(file: str, metadata: pq.FileMetaData) -> bytes:
    # The offsets in a footer count from the beginning of its own file. If that is not
    # the beginning of this one, another file ends between its data and its footer,
    # where otherwise nothing is, or indexes.
    chunks = (
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    ends = (_begin_bytes(each) + each.total_compressed_size for each in chunks)
    with files.opened(file) as stream:
        footer = stream.seek(-metadata.serialized_size - _TAIL_BYTES, os.SEEK_END)
        at = stream.seek(max(ends, default=len(_MAGIC)))
        before = b""
        while at < footer:
            content = before + stream.read(min(_CHUNK_BYTES, footer - at))
            if 2 * _MAGIC in content:
                end = at - len(before) + content.index(2 * _MAGIC) + len(_MAGIC)
                raise errors.DataError(
                    f"{file}: another file ends in it, before byte {end};"
                    f" {files.JOINED}"
                )
            before, at = content[1 - 2 * len(_MAGIC) :], stream.tell()
        stream.seek(footer)
        return stream.read()


def _row_group_bytes(parquet: Parquet, unit: units.Unit) -> int:
    # The approximate size of the decoded columns.
    group = _metadata(parquet.files[unit.file]).row_group(unit.block)
    size = 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        if _is_read(chunk.path_in_schema, parquet.columns):
            width = _WIDTHS.get(chunk.physical_type)
            decoded = width * chunk.num_values if width else 0
            size += max(decoded, chunk.total_uncompressed_size)
    return size


def _begin_bytes(chunk: pq.ColumnChunkMetaData) -> int:
    # The first byte of a column chunk, which may begin with its dictionary.
    return min(
        chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset
    )


def _is_read(path: str, columns: Sequence[str]) -> bool:
    # Whether a leaf is in one of the columns, whose names may contain dots.
    names = (path == name or path.startswith(f"{name}.") for name in columns)
    return not columns or any(names)


def library() -> Any:
    """`pyarrow.parquet`.

    Raises:
      ConfigError: if it is not installed.
    """
    return extras.module(
        "pyarrow.parquet", extra="parquet", otherwise="set grain_file_type to another"
    )
