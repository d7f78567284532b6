"""Parquet files: small row groups are decoded whole, larger ones in parts."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from elastic_ckpt.core import digest, storage
from elastic_ckpt.data.sources import columns, decoded, files, source

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# The size of a read from a column chunk.
_BUFFER_BYTES = 64 * 1024
# The size in bytes of a decoded number of each type.
_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
# Begins and ends a file; at the end, the footer and its length precede it.
_MAGIC = b"PAR1"
_TAIL_BYTES = 8
_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(source.Source):
    """Parquet files as a source; a block is a row group, or a part of a large one.

    An element maps each column name to a value: lists of numbers are read-only NumPy
    arrays, text is `str`, nulls are None, and other values are as Arrow converts them
    to Python.

    Attributes:
      files: the paths or URIs of the files.
      columns: the columns to read; empty reads all.
    """

    file_type = "parquet"
    _is_kept = False

    def _find(self, file: str) -> source.Found:
        # The rows of each row group, from the file's footer.
        metadata = _metadata(file)
        source.check_columns(
            file, self.columns, metadata.schema.to_arrow_schema().names
        )
        records: list[int] = []
        starts: list[int] = []
        chains: list[int] = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            sizes = source.pieces(group.num_rows, _num_bytes(group, self.columns))
            records += sizes
            starts += [_begin_bytes(group.column(0))] * len(sizes)
            chains += [number] * len(sizes)
        return source.Found(
            digest.bytes_digest(_footer(file, metadata)),
            records,
            None if self.columns else starts,
            chains,
        )

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        return decoded.in_sequence(
            self, file, block, functools.partial(self._chain, file, block)
        )

    def _chain(self, file: int, block: int) -> Iterator[source.Block]:
        # The blocks of a row group.
        path, index = self.files[file], source.indexes(self)[file]
        group, chain = int(index.chains[block]), index.chain(block)
        sizes = index.block_records[chain.start : chain.stop].tolist()
        is_local = storage.is_local(path)
        corrupt = functools.partial(source.corrupt, f"{path}, row group {group}")
        with columns.pyarrow(".parquet").ParquetFile(
            path if is_local else files.opened(path),
            # A mapped file needs neither buffers nor copies.
            memory_map=is_local,
            metadata=_metadata(path),
            buffer_size=0 if is_local else _BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as opened:
            batches = opened.iter_batches(
                batch_size=max(sizes),
                row_groups=[group],
                columns=list(self.columns) or None,
                use_threads=False,
            )
            for size in sizes:
                with columns.damaged(corrupt):
                    batch = next(batches, None)
                if batch is None or batch.num_rows != size:
                    raise corrupt("its number of rows differs from the footer's")
                yield columns.checked(batch, corrupt)


@functools.lru_cache(maxsize=1024)
def _metadata(file: str) -> pq.FileMetaData:
    foreign = functools.partial(source.foreign, file, "Parquet")
    with files.opened(file) as stream, columns.damaged(foreign):
        return columns.pyarrow(".parquet").read_metadata(stream)


files.register_cache(_metadata.cache_clear)


def _footer(file: str, metadata: pq.FileMetaData) -> bytes:
    # In files joined by `cat`, offsets are relative to the beginning of the last file,
    # so a file boundary shows up between the data and the footer, where there are
    # normally at most indexes.
    chunks = (
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    ends = (_begin_bytes(each) + each.total_compressed_size for each in chunks)
    with files.opened(file) as stream:
        footer = stream.seek(-metadata.serialized_size - _TAIL_BYTES, os.SEEK_END)
        stream.seek(max(ends, default=len(_MAGIC)))
        between = b""
        while (left := footer - stream.tell()) > 0:
            # Finds the end of one file and the beginning of the next across two reads.
            between = between[1 - 2 * len(_MAGIC) :] + stream.read(
                min(_CHUNK_BYTES, left)
            )
            if 2 * _MAGIC in between:
                raise source.foreign(file, "Parquet", "another file ends inside it")
        stream.seek(footer)
        return stream.read()


def _num_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    # The approximate size of the decoded columns. Names may contain dots.
    size = 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = f"{chunk.path_in_schema}."
        if not columns or path.startswith(tuple(f"{name}." for name in columns)):
            width = _WIDTHS.get(chunk.physical_type, 0)
            size += max(width * chunk.num_values, chunk.total_uncompressed_size)
    return size


def _begin_bytes(chunk: pq.ColumnChunkMetaData) -> int:
    # The first byte of a column chunk, which may begin with its dictionary.
    return min(
        chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset
    )
