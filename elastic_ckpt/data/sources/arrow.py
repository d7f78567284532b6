"""Arrow files, as Hugging Face `datasets` saves them, mapped into memory.

A file is a stream of messages, with or without the frame of Arrow's file format.
Finding the record batches requires a pass over the messages' metadata, once for each
version of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data.sources import columns, files, source

if TYPE_CHECKING:
    import pyarrow as pa

# Begins a file, but not a stream; messages follow after padding to 8 bytes. Also ends
# the file, after the footer and the footer's length.
_MAGIC = b"ARROW1"
_END = struct.Struct(f"<i{len(_MAGIC)}s")
_FIRST_OF_FILE = 8
# The start of a message, and the maximum size of the first one.
_MARK = b"\xff\xff\xff\xff"
_SCHEMA_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow(source.Source):
    """Arrow files as a source; a block is a record batch, or a part of a large one.

    It reads both of Arrow's formats, streams and files. `from_hf` creates a source from
    a Hugging Face dataset.

    An element maps each column name to a value: lists of numbers are NumPy arrays, text
    is `str`, nulls are None, and other values are as Arrow converts them to Python.
    Arrow files do not have checksums, so damage is only detected if it makes a value
    invalid, such as text that is not UTF-8.

    Attributes:
      files: the paths or URIs of the files; a remote file is copied to this machine
        first.
      columns: the columns to read; empty reads all.
    """

    file_type = "arrow"

    def _find(self, file: str) -> source.Found:
        # The digest covers the metadata of all messages.
        ipc, content = columns.pyarrow().ipc, digest.values_hash()
        starts: list[int] = []
        records: list[int] = []
        local = files.local_copy(file)
        foreign = functools.partial(source.foreign, file, "Arrow")
        source.check_columns(file, self.columns, _schema(local, file).names)
        with columns.damaged(foreign), _mapped(local) as stream:
            content.update(_schema(local, file).serialize())
            for start, message in _messages(stream):
                content.update(message.metadata)
                if message.type != "record batch":
                    raise errors.DataError(
                        f"{file} has a {message.type} message at byte {start}, which"
                        " cannot be read; write the data as one Arrow file without"
                        " dictionaries, or as Parquet; if the file was joined with"
                        " cat, list the original files"
                    )
                # With no columns, nothing is decompressed.
                batch = ipc.read_record_batch(message, columns.pyarrow().schema([]))
                sizes = source.pieces(batch.num_rows, len(message.body))
                starts += [start] * len(sizes)
                records += sizes
            end = stream.tell()
            if end + _num_end_bytes(stream) != stream.size():
                raise foreign(
                    f"it does not end after its record batches, at byte {end}"
                )
        return source.Found(content.hexdigest(), records, starts)

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        path, index = self.files[file], source.indexes(self)[file]
        offset = index.block_starts[block]
        # All blocks of a record batch have its offset.
        begin = int(np.searchsorted(index.block_starts, offset))
        first = int(index.block_records[begin:block].sum())
        place = f"{path}, record batch at byte {offset}"
        corrupt = functools.partial(source.corrupt, place)
        local = files.local_copy(path)
        with columns.damaged(corrupt), _mapped(local) as stream:
            stream.seek(offset)
            message = columns.pyarrow().ipc.read_message(stream)
            batch = columns.pyarrow().ipc.read_record_batch(
                message, _schema(local, path)
            )
        rows = batch.slice(first, index.block_records[block])
        if len(rows) < index.block_records[block]:
            raise corrupt(f"the record batch has only {len(batch)} rows")
        read = rows.select(list(self.columns)) if self.columns else rows
        return columns.checked(read, corrupt, is_mapped=True)


def from_hf(dataset: Any, *, columns: tuple[str, ...] = ()) -> Arrow:
    """Returns the files of a Hugging Face dataset as a source.

    Args:
      dataset: a `datasets.Dataset` on disk.
      columns: the columns to read; empty reads all.

    Raises:
      ConfigError: if `dataset` is anything else, or if its rows differ from the rows in
        its files.
    """
    found = getattr(dataset, "cache_files", None)
    names = [each["filename"] for each in found] if isinstance(found, list) else []
    made = Arrow(files=tuple(names), columns=columns) if names else None
    is_reordered = getattr(dataset, "_indices", None) is not None
    if made is None or is_reordered or source.num_records(made) != len(dataset):
        raise errors.ConfigError(
            f"from_hf: this {type(dataset).__name__} is not a datasets.Dataset with all"
            " rows of its files on disk, in order; save one split with"
            " dataset.flatten_indices().save_to_disk(DIRECTORY), and pass"
            " datasets.load_from_disk(DIRECTORY)"
        )
    return made


def _messages(stream: Any) -> Iterator[tuple[int, Any]]:
    # The messages after the schema, each with its offset.
    begin = stream.tell()
    try:
        columns.pyarrow().ipc.read_message(stream)
    except (columns.pyarrow().ArrowException, OSError):
        # Polars 2.1 does not write the schema message's length, which readers of the
        # file format do not need. The next message begins with a mark.
        stream.seek(begin)
        stream.seek(begin + stream.read(_SCHEMA_BYTES).find(_MARK))
    with contextlib.suppress(EOFError):
        while True:
            yield stream.tell(), columns.pyarrow().ipc.read_message(stream)


def _num_end_bytes(stream: Any) -> int:
    # The number of bytes after the messages: in a file, a footer and its length.
    stream.seek(0)
    if stream.read(len(_MAGIC)) != _MAGIC:
        return 0
    stream.seek(max(0, stream.size() - _END.size))
    footer_bytes, _ = _END.unpack(stream.read().rjust(_END.size))
    return footer_bytes + _END.size


@functools.lru_cache(maxsize=1024)
def _schema(local: str, file: str) -> pa.Schema:
    foreign = functools.partial(source.foreign, file, "Arrow")
    with columns.damaged(foreign), _mapped(local) as stream:
        if stream.tell():
            return columns.pyarrow().ipc.open_file(stream).schema
        return columns.pyarrow().ipc.read_schema(stream)


files.register_cache(_schema.cache_clear)


def _mapped(file: str) -> Any:
    # The file, positioned at the first message.
    stream = columns.pyarrow().memory_map(file)
    stream.seek(_FIRST_OF_FILE if stream.read(len(_MAGIC)) == _MAGIC else 0)
    return stream
