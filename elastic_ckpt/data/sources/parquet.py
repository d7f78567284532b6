"""Parquet files, read by row group and decoded in small batches.

Between its turns a shard holds a small batch of rows and, if it was read recently, an
open row group. Shards that read parts of the same row group share its table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import (
    arrow_rows,
    files,
    kept_blocks,
    parquet_pages,
    source,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# The decoded size of a shard's batch, if its row group stays open.
_BATCH_BYTES = 128 * 1024
# A smaller row group does not stay open: it has larger batches, and is decoded from its
# beginning for each. That costs less than holding a page while other shards read.
_SMALL_BYTES = 2 * 1024 * 1024
_SMALL_BATCH_BYTES = 512 * 1024
# Batches are so many times as large if they stay columns.
_IN_COLUMNS = 2
# The size of a read from a column chunk.
_BUFFER_BYTES = 64 * 1024
# The size of a decoded number of each type in bytes.
_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
# The most open row groups in a process.
_MAX_OPEN = 256
# From this number of parts on, shards share the table of a row group.
_SHARED_PARTS = 4
# The largest table that shards share.
_MAX_SHARED_BYTES = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(source.Source):
    """Parquet files as a source; a block is a row group.

    An element has the value of each column by name: lists of numbers as read-only NumPy
    arrays, text as `str`, other values as Arrow converts them to Python; None if there
    is no value.

    Attributes:
      files: the paths or URIs of the files.
      columns: the columns to read; all if it is empty.
    """

    file_type = "parquet"

    def index(self, file: str) -> source.FileIndex:
        """The rows of each row group, from the file's footer."""
        metadata = _metadata(file)
        names = metadata.schema.to_arrow_schema().names
        source.check_columns(file, self.columns, names)
        return source.FileIndex(
            content=files.content(file),
            block_records=np.array(
                [
                    metadata.row_group(n).num_rows
                    for n in range(metadata.num_row_groups)
                ],
                np.int64,
            ),
            block_bytes=() if self.columns else _starts(metadata),
        )

    def read(self, unit: units.Unit, skip: int) -> Iterator[source.Read]:
        """Reads the rows of a unit, a row group or a part of it, from number `skip`."""
        rows = _OpenRows(self, unit, skip)
        return arrow_rows.records(self._read(rows, unit, skip))

    def read_batches(
        self, unit: units.Unit, skip: int
    ) -> Iterator[pa.RecordBatch | source.CorruptError]:
        """As `read`, but rows that follow each other are yielded together."""
        return self._read(_OpenRows(self, unit, skip, scale=_IN_COLUMNS), unit, skip)

    def decoded(self, unit: units.Unit, *, tokens: str = "") -> kept_blocks.Decoded:
        """The row group of a unit; of the column of tokens only, if one is named."""
        file, block = self.files[unit.file], unit.block
        place = self.place(unit)
        try:
            batch = files.retried(
                functools.partial(_row_group, file, block, self.columns), place
            )
            if batch.num_rows == unit.block_records:
                return kept_blocks.Decoded(batch, tokens=tokens)
            problem: object = "not as many rows as in the footer"
        except _CorruptPage as error:
            problem = error
        left = files.retried(
            functools.partial(_salvaged, file, block, self.columns), place
        )
        lost = np.zeros(unit.block_records, bool)
        for first, stop in ((0, len(lost)),) if left is None else left.lost:
            lost[first:stop] = True
        batch = None if left is None else _joined(left.table)
        return kept_blocks.Decoded(batch, lost=lost, problem=problem)

    def place(self, unit: units.Unit) -> str:
        """The row group of a unit, for errors."""
        return f"{self.files[unit.file]}, row group {unit.block}"

    def _read(
        self, rows: _OpenRows, unit: units.Unit, skip: int
    ) -> Iterator[pa.RecordBatch | source.CorruptError]:
        place = self.place(unit)
        row, stop = unit.first + skip, unit.first + unit.num_records
        # A local name: at the end of the program the module's may be deleted first.
        corrupt_page = _CorruptPage
        while row < stop:
            try:
                batch = files.retried(functools.partial(_next, rows), place)
            except corrupt_page as error:
                yield from self._rest(unit, place, row, error)
                return
            batch = batch.slice(0, stop - row)
            yield from arrow_rows.checked(batch, place, row)
            row += batch.num_rows

    def _rest(
        self, unit: units.Unit, place: str, row: int, problem: Exception
    ) -> Iterator[pa.RecordBatch | source.CorruptError]:
        # The rows of a unit from `row` on, of a row group with damaged pages.
        stop = unit.first + unit.num_records
        left = files.retried(
            functools.partial(
                _salvaged, self.files[unit.file], unit.block, self.columns
            ),
            place,
        )
        if left is None:
            yield source.corrupt(
                f"{place}, from row {row} on", problem, num_records=stop - row
            )
            return
        lost = [(max(a, row), min(b, stop)) for a, b in left.lost]
        for first, end in [*((a, b) for a, b in lost if a < b), (stop, stop)]:
            for batch in left.table.slice(row, first - row).to_batches():
                yield from arrow_rows.checked(batch, place, row)
                row += batch.num_rows
            if first < end:
                yield source.corrupt(
                    f"{place}, rows {first} to {end - 1}",
                    problem,
                    num_records=end - first,
                )
            row = end


def _starts(metadata: pq.FileMetaData) -> tuple[int, ...]:
    # The first byte of each row group: a column begins with its dictionary.
    starts = []
    for number in range(metadata.num_row_groups):
        first = metadata.row_group(number).column(0)
        dictionary = first.dictionary_page_offset or first.data_page_offset
        starts.append(min(dictionary, first.data_page_offset))
    return tuple(starts)


def _is_small_part(unit: units.Unit) -> bool:
    # Several shards read small parts: it is cheaper to decode the row group once and
    # keep it than to decode the rows before the part in each shard.
    return unit.num_records * _SHARED_PARTS <= unit.block_records


class _CorruptPage(Exception):
    pass


class _OpenRows:
    """Batches of a row group from a row on; it may be closed between two batches.

    Args:
      parquet: the files.
      unit: the row group, or a part of it.
      skip: the rows of the unit to leave out.
      scale: how many times as large as usual the batches are.
    """

    def __init__(
        self, parquet: Parquet, unit: units.Unit, skip: int, *, scale: int = 1
    ) -> None:
        self._parquet = parquet
        self._scale = scale
        self._unit = unit
        self.row = unit.first + skip
        is_small = _row_group_bytes(parquet, unit) <= _SMALL_BYTES
        self.stays_open = not is_small or _is_small_part(unit)

    def open(self) -> Iterator[pa.RecordBatch]:
        """Batches from the next row on."""
        unit = self._unit
        table = _shared_table(self._parquet, unit) if _is_small_part(unit) else None
        if table is not None:
            return _skipped(_shared(table, unit), self.row - unit.first)
        return _skipped(_streamed(self._parquet, unit, self._scale), self.row)


def _next(rows: _OpenRows) -> pa.RecordBatch:
    import pyarrow as pa

    try:
        batch = next(_open_batches(rows))
    except StopIteration:
        raise _CorruptPage("fewer rows than in the footer") from None
    except (pa.ArrowInvalid, pa.ArrowException, OSError, EOFError) as error:
        _close(rows)
        if _is_from_outside(error):
            raise
        raise _CorruptPage(error) from None
    rows.row += batch.num_rows
    if not rows.stays_open:
        _close(rows)
    return batch


def _is_from_outside(error: Exception) -> bool:
    # Arrow also raises OSError for bytes that it cannot decode, but without an errno.
    bare = type(error) is OSError and error.errno is None
    return isinstance(error, OSError) and not bare


def _row_group(file: str, block: int, columns: tuple[str, ...]) -> pa.RecordBatch:
    import pyarrow as pa

    try:
        with _open(file, buffered=False) as opened:
            return _joined(
                opened.read_row_group(
                    block, columns=list(columns) or None, use_threads=False
                )
            )
    except (pa.ArrowInvalid, pa.ArrowException, OSError, EOFError) as error:
        if _is_from_outside(error):
            raise
        raise _CorruptPage(error) from None


def _joined(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch


def _shared(table: pa.Table, unit: units.Unit) -> Iterator[pa.RecordBatch]:
    # While this generator is open, it keeps the table alive for other shards.
    num_batches = max(1, table.nbytes // _BATCH_BYTES)
    batch_rows = -(-table.num_rows // num_batches)
    part = table.slice(unit.first, unit.num_records)
    yield from part.to_batches(max_chunksize=batch_rows)


def _skipped(
    batches: Iterator[pa.RecordBatch], num_rows: int
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if num_rows < batch.num_rows:
            yield batch.slice(num_rows)
            break
        num_rows -= batch.num_rows
    yield from batches


def _streamed(
    parquet: Parquet, unit: units.Unit, scale: int
) -> Iterator[pa.RecordBatch]:
    file, columns = parquet.files[unit.file], list(parquet.columns) or None
    num_bytes = _row_group_bytes(parquet, unit)
    batch_bytes = _BATCH_BYTES if num_bytes > _SMALL_BYTES else _SMALL_BATCH_BYTES
    num_batches = max(1, -(-num_bytes // (scale * batch_bytes)))
    batch_rows = -(-unit.block_records // num_batches)
    with _open(file, buffered=True) as opened:
        yield from opened.iter_batches(
            batch_size=batch_rows,
            row_groups=[unit.block],
            columns=columns,
            use_threads=False,
        )


def _shared_table(parquet: Parquet, unit: units.Unit) -> pa.Table | None:
    # None if the row group is too large to keep: each reader of a part then decodes the
    # rows before it.
    file, columns = parquet.files[unit.file], list(parquet.columns) or None
    if _row_group_bytes(parquet, unit) > _MAX_SHARED_BYTES:
        return None
    key = (file, unit.block, parquet.columns)
    with _TABLES_LOCK:
        table = _TABLES.get(key)
        if table is None:
            with _open(file, buffered=False) as opened:
                table = opened.read_row_group(
                    unit.block, columns=columns, use_threads=False
                )
            _TABLES[key] = table
        return table


def _open_batches(rows: _OpenRows) -> Iterator[pa.RecordBatch]:
    with _OPEN_LOCK:
        batches = _OPEN.pop(rows, None)
    if batches is None:
        batches = rows.open()
    with _OPEN_LOCK:
        _OPEN[rows] = batches
        while len(_OPEN) > _MAX_OPEN:
            _OPEN.pop(next(iter(_OPEN)))
    return batches


def _close(rows: _OpenRows) -> None:
    with _OPEN_LOCK:
        _OPEN.pop(rows, None)


# The open row groups, the least recently used first.
_OPEN_LOCK = threading.Lock()
_OPEN: weakref.WeakKeyDictionary[_OpenRows, Any] = weakref.WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()
_TABLES: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


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
    read_metadata = library().read_metadata
    import pyarrow as pa

    try:
        with files.opened(file) as stream:
            return read_metadata(stream)
    except (pa.ArrowInvalid, pa.ArrowException, OSError, UnicodeError) as error:
        if _is_from_outside(error):
            raise
        advice = files.route(file, own=(".parquet",))
        raise errors.DataError(
            f"{file}: not a complete Parquet file ({error}); {advice}"
        ) from None


@functools.lru_cache(maxsize=2)
def _salvaged(
    file: str, block: int, columns: tuple[str, ...]
) -> parquet_pages.Salvaged | None:
    metadata = _metadata(file)

    def open_with(stream: BinaryIO) -> pq.ParquetFile:
        return library().ParquetFile(
            stream,
            metadata=metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    with files.opened(file) as stream:
        return parquet_pages.salvaged(stream, metadata, block, columns, open_with)


files.register_cache(_metadata.cache_clear)
files.register_cache(_salvaged.cache_clear)
files.register_cache(_TABLES.clear)


def _row_group_bytes(parquet: Parquet, unit: units.Unit) -> int:
    # The approximate size of the decoded columns.
    group = _metadata(parquet.files[unit.file]).row_group(unit.block)
    size = 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        if not parquet.columns or _is_in(chunk.path_in_schema, parquet.columns):
            width = _WIDTHS.get(chunk.physical_type)
            decoded = width * chunk.num_values if width else 0
            size += max(decoded, chunk.total_uncompressed_size)
    return size


def _is_in(path: str, columns: tuple[str, ...]) -> bool:
    # Whether a leaf is in one of the columns, whose names may contain dots.
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def library() -> Any:
    """`pyarrow.parquet`.

    Raises:
      ConfigError: if it is not installed.
    """
    return extras.module(
        "pyarrow.parquet", extra="parquet", otherwise="set grain_file_type to another"
    )
