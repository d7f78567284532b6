"""Arrow files, as Hugging Face `datasets` saves them; they are mapped.

A file is a stream of messages, with or without the frame of Arrow's file format.
Finding the record batches requires a pass over the metadata of the messages, which is
made once for each version of a file (`offset_index`).
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import digest, errors, extras
from elastic_ckpt.data.sources import columns, files, offset_index, source

if TYPE_CHECKING:
    import pyarrow as pa

# Begins a file, but not a stream; messages follow after padding to 8 bytes. It ends the
# file, too, after the footer and its length.
_MAGIC = b"ARROW1"
_END = struct.Struct(f"<i{len(_MAGIC)}s")
_FIRST_OF_FILE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow(source.Source):
    """Arrow files as a source; a block is a record batch, or a part of a large one.

    Both of Arrow's formats are read, streams and files. `from_hf` makes a source of a
    Hugging Face dataset.

    An element has the value of each column by name: lists of numbers as NumPy arrays,
    text as `str`, other values as Arrow converts them to Python; None if there is no
    value. Arrow files have no checksums: damage is found where values cannot be as they
    are, such as text that is not UTF-8.

    Attributes:
      files: the paths or URIs of the files; a remote file is copied to this machine
        first.
      columns: the columns to read; all if it is empty.
    """

    file_type = "arrow"

    def index(self, file: str) -> source.FileIndex:
        """The offset and the rows of each record batch."""
        index = offset_index.of_blocks("arrow", file, functools.partial(_found, file))
        source.check_columns(file, self.columns, _schema(files.local_copy(file)).names)
        return index

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        path, index = self.files[file], source.indexes(self)[file]
        assert index.block_bytes is not None
        offset = index.block_bytes[block]
        # All blocks of a record batch have its offset.
        begin = int(np.searchsorted(index.block_bytes, offset))
        first = int(index.block_records[begin:block].sum())
        place = f"{path}, record batch at byte {offset}"
        local = files.local_copy(path)
        try:
            with _mapped(local) as stream, columns.damaged():
                stream.seek(offset)
                message = pyarrow().ipc.read_message(stream)
                batch = pyarrow().ipc.read_record_batch(message, _schema(local))
        except columns.DamagedError as error:
            return source.LostBlock(place, error)
        rows = batch.slice(first, index.block_records[block])
        if len(rows) < index.block_records[block]:
            return source.LostBlock(place, f"it has {len(batch)} rows")
        read = rows.select(list(self.columns)) if self.columns else rows
        return columns.checked(read, place, is_mapped=True)


def from_hf(dataset: Any, *, columns: tuple[str, ...] = ()) -> Arrow:
    """The files of a Hugging Face dataset, as a source.

    Args:
      dataset: a `datasets.Dataset` that lies on disk.
      columns: the columns to read; all if it is empty.

    Raises:
      ConfigError: if it is another object, or its rows are not those of its files.
    """
    remedy = (
        "save it, dataset.flatten_indices().save_to_disk(DIRECTORY), and give"
        " ec.data.from_hf(datasets.load_from_disk(DIRECTORY))"
    )
    kind = type(dataset)
    if not hasattr(dataset, "cache_files") or isinstance(dataset, dict):
        splits = (
            f"one of its splits, {sorted(dataset)}"
            if isinstance(dataset, dict)
            else "a datasets.Dataset"
        )
        raise errors.ConfigError(f"from_hf: got a {kind.__name__}; give {splits}")
    names = [each["filename"] for each in dataset.cache_files]
    if not names:
        raise errors.ConfigError(f"from_hf: the dataset lies in memory only; {remedy}")
    made = Arrow(files=tuple(names), columns=columns)
    is_reordered = getattr(dataset, "_indices", None) is not None
    if is_reordered or source.num_records(made) != len(dataset):
        raise errors.ConfigError(
            "from_hf: the dataset is a selection of the rows of its files, or has"
            f" another order; {remedy}"
        )
    return made


def _found(file: str) -> offset_index.Offsets:
    # The digest is of the metadata of all messages.
    ipc, content = pyarrow().ipc, digest.values_hash()
    starts: list[int] = []
    counts: list[int] = []
    local = files.local_copy(file)
    with _mapped(local) as stream, columns.damaged(functools.partial(_foreign, file)):
        stream.seek(_first(stream))
        content.update(ipc.read_message(stream).metadata)
        end = stream.tell()
        while (message := _next_message(stream)) is not None:
            content.update(message.metadata)
            if message.type != "record batch":
                raise errors.DataError(
                    f"{file}: a {message.type} message at byte {end}, which is not read"
                    " from Arrow files; write the data without dictionaries, as one"
                    " file or to Parquet"
                )
            # Without a column, nothing is decompressed.
            batch = ipc.read_record_batch(message, pyarrow().schema([]))
            sizes = source.pieces(batch.num_rows, len(message.body)).tolist()
            starts += [end] * len(sizes)
            counts += sizes
            end = stream.tell()
        _check_end(file, stream)
    return offset_index.Offsets(starts, counts, content.hexdigest())


def _next_message(stream: Any) -> Any:
    try:
        return pyarrow().ipc.read_message(stream)
    except EOFError:
        return None


def _check_end(file: str, stream: Any) -> None:
    # What is behind the messages.
    end = messages_end = stream.tell()
    num_bytes = stream.size()
    if _first(stream):
        stream.seek(max(0, num_bytes - _END.size))
        footer_bytes, magic = _END.unpack(stream.read().rjust(_END.size))
        if magic != _MAGIC:
            raise _foreign(file, f"it is cut short after {num_bytes} bytes")
        end += footer_bytes + _END.size
    if end != num_bytes:
        raise errors.DataError(
            f"{file}: its record batches end at byte {messages_end}, and more follows;"
            f" {files.JOINED}"
        )


def _first(stream: Any) -> int:
    # The offset of the first message.
    stream.seek(0)
    return _FIRST_OF_FILE if stream.read(len(_MAGIC)) == _MAGIC else 0


def _foreign(file: str, problem: object) -> errors.DataError:
    return errors.DataError(
        f"{file}: not a complete Arrow file ({problem}); {files.RESTORE}"
    )


@functools.lru_cache(maxsize=1024)
def _schema(file: str) -> pa.Schema:
    with _mapped(file) as stream, columns.damaged(functools.partial(_foreign, file)):
        stream.seek(_first(stream))
        return pyarrow().ipc.read_schema(stream)


files.register_cache(_schema.cache_clear)


def _mapped(file: str) -> Any:
    return pyarrow().memory_map(file)


def pyarrow() -> Any:
    """`pyarrow`.

    Raises:
      ConfigError: if it is not installed.
    """
    return extras.module("pyarrow", extra="parquet", otherwise="use other files")
