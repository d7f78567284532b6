"""Parquet files: small row groups are decoded whole, others a little at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import digest, errors, extras, storage
from elastic_ckpt.data.sources import columns, decoded, files, source

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# The size of a read from a column chunk.
_BUFFER_BYTES = 64 * 1024
# The size of a decoded number of each type in bytes.
_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
# Begins and ends a file; before it is the length of the footer at the end.
_MAGIC = b"PAR1"
_TAIL_BYTES = 8
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(source.Source):
    """Parquet files as a source; a block is a row group, or a part of a large one.

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
        footer = _footer(file, metadata)
        groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
        sizes = [
            source.pieces(group.num_rows, _num_bytes(group, self.columns))
            for group in groups
        ]
        counts = np.array(list(map(len, sizes)), int)
        is_chained = np.ones(counts.sum(), bool)
        is_chained[np.cumsum(counts) - counts] = False
        starts = [_begin_bytes(group.column(0)) for group in groups]
        return source.FileIndex(
            content=files.content(file).including(digest.bytes_digest(footer)),
            block_records=np.concatenate([np.zeros(0, np.int64), *sizes]),
            block_bytes=None if self.columns else np.repeat(starts, counts),
            is_chained=is_chained,
        )

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        return decoded.in_turn(
            self, file, block, functools.partial(self._chain, file, block)
        )

    def _chain(self, file: int, block: int) -> Iterator[source.Block]:
        # The blocks of a row group.
        index = source.indexes(self)[file]
        assert index.is_chained is not None
        group = int(np.sum(~index.is_chained[: block + 1])) - 1
        chain = index.chain(block)
        sizes = index.block_records[chain.start : chain.stop].tolist()
        place = f"{self.files[file]}, row group {group}"
        with _open(self.files[file], buffered=len(sizes) > 1) as opened:
            batches = opened.iter_batches(
                batch_size=max(sizes),
                row_groups=[group],
                columns=list(self.columns) or None,
                use_threads=False,
            )
            for size in sizes:
                try:
                    with columns.damaged():
                        batch = next(batches, None)
                except columns.DamagedError as error:
                    problem: object = error
                    break
                if batch is None or batch.num_rows != size:
                    problem = "not as many rows as in the footer"
                    break
                yield columns.checked(batch, place)
            else:
                return
        yield from itertools.repeat(source.LostBlock(place, problem), len(sizes))


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
    with files.opened(file) as stream, columns.damaged(foreign):
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


def _num_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    # The approximate size of the decoded columns.
    size = 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        if _is_read(chunk.path_in_schema, columns):
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
