"""Arrow files, as Hugging Face `datasets` saves them; local ones are mapped.

A file is a stream of messages, with or without the frame of Arrow's file format. Each
message has a length, metadata (a FlatBuffers table), and a body. Finding the record
batches requires a pass over the metadata, which is made once for each version of a file
(`offset_index`).
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import (
    arrow_rows,
    files,
    kept_blocks,
    offset_index,
    source,
)

if TYPE_CHECKING:
    import pyarrow as pa

# About how many bytes of a record batch are read together.
_BATCH_BYTES = 256 * 1024
# Begins a file, but not a stream; messages follow after padding to 8 bytes. It ends the
# file, too, after the footer and its length.
_MAGIC = b"ARROW1"
_END = struct.Struct(f"<i{len(_MAGIC)}s")
_FIRST_OF_FILE = 8
# Begins each message, before the length of its metadata.
_CONTINUATION = 0xFFFFFFFF
_PREFIX = struct.Struct("<Ii")
# The numbers of the fields of a message, and of a record batch; kinds of headers.
_KIND, _HEADER, _BODY_BYTES = 1, 2, 3
_NUM_ROWS = 0
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MOST_METADATA_BYTES = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow(kept_blocks.BlockFiles):
    """Arrow files as a source; a block is a record batch.

    Both of Arrow's formats are read, streams and files. `from_hf` makes a source of a
    Hugging Face dataset.

    An element has the value of each column by name: lists of numbers as NumPy arrays,
    text as `str`, other values as Arrow converts them to Python; None if there is no
    value. Arrow files have no checksums: damage is found where values cannot be as they
    are, such as text that is not UTF-8.

    Attributes:
      files: the paths or URIs of the files.
      columns: the columns to read; all if it is empty.
    """

    file_type = "arrow"
    _block_name = "record batch"

    def index(self, file: str) -> source.FileIndex:
        """The offset and the rows of each record batch."""
        walk = functools.partial(_walk, file)
        index = offset_index.index("arrow", file, walk, digests_all=False)
        source.check_columns(file, self.columns, _schema(file).names)
        return index

    def _batch(self, unit: units.Unit) -> pa.RecordBatch:
        """See `BlockFiles`."""
        import pyarrow as pa

        file = self.files[unit.file]
        schema = _schema(file)
        with _opened(file) as stream, arrow_rows.damaged():
            stream.seek(source.indexes(self)[unit.file].block_bytes[unit.block])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema)
        if batch.num_rows != unit.block_records:
            raise arrow_rows.DamagedError(f"it has {batch.num_rows} rows")
        read = batch.select(list(self.columns)) if self.columns else batch
        return arrow_rows.sound(read)

    def _stream(self, unit: units.Unit, row: int) -> Iterator[pa.RecordBatch]:
        """See `BlockFiles`."""
        batch = files.retried(functools.partial(self._batch, unit), self.place(unit))
        size = max(1, batch.num_rows * _BATCH_BYTES // max(batch.nbytes, 1))
        yield from (batch.slice(n, size) for n in range(row, batch.num_rows, size))


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


def _walk(file: str, stream: BinaryIO, num_bytes: int) -> offset_index.Offsets:
    starts, counts = [], []
    is_file = stream.read(len(_MAGIC)) == _MAGIC
    first = offset = _FIRST_OF_FILE if is_file else 0
    while (message := _message(stream, file, offset)) is not None:
        metadata, size = message
        try:
            kind, body_bytes, num_rows = _parsed(metadata)
        except (struct.error, IndexError, ValueError):
            raise _foreign(file, f"a message at byte {offset} is damaged") from None
        if kind == _DICTIONARY:
            raise errors.DataError(
                f"{file}: a column is encoded by a dictionary, which is not read"
                " from Arrow files; write it decoded, for example to Parquet"
            )
        if (kind == _SCHEMA) != (offset == first):
            raise _foreign(file, f"the message at byte {offset} is out of place")
        if kind == _BATCH:
            starts.append(offset)
            counts.append(num_rows)
        offset += size + body_bytes
    end, footer_bytes, magic = stream.tell(), 0, _MAGIC
    if is_file:
        stream.seek(max(0, num_bytes - _END.size))
        footer_bytes, magic = _END.unpack(stream.read().rjust(_END.size))
        end += footer_bytes + _END.size
    if magic != _MAGIC or offset > num_bytes or offset == first:
        raise _foreign(file, f"it is cut short after {num_bytes} bytes")
    if end != num_bytes:
        raise errors.DataError(
            f"{file}: its record batches end at byte {offset}, and more follows;"
            f" {files.JOINED}"
        )
    return starts, counts


def _message(stream: BinaryIO, file: str, offset: int) -> tuple[bytes, int] | None:
    # The metadata of the message at an offset, and the bytes before its body; None at
    # the end of the messages.
    stream.seek(offset)
    prefix = stream.read(_PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < _PREFIX.size:
        raise _foreign(file, f"it is cut short at byte {offset}")
    mark, num_bytes = _PREFIX.unpack(prefix)
    if mark != _CONTINUATION or not 0 <= num_bytes <= _MOST_METADATA_BYTES:
        raise _foreign(file, f"there is no message at byte {offset}")
    if not num_bytes:
        return None
    metadata = stream.read(num_bytes)
    if len(metadata) < num_bytes:
        raise _foreign(file, f"it is cut short at byte {offset}")
    return metadata, _PREFIX.size + num_bytes


def _parsed(metadata: bytes) -> tuple[int, int, int]:
    # The kind of a message, the bytes of its body, and the rows of a record batch.
    (table,) = struct.unpack_from("<I", metadata)
    kind = _field(metadata, table, _KIND, "<B")
    body_bytes = _field(metadata, table, _BODY_BYTES, "<q")
    if body_bytes < 0:
        raise ValueError(body_bytes)
    if kind != _BATCH:
        return kind, body_bytes, 0
    at = _place(metadata, table, _HEADER)
    if at is None:
        raise ValueError("no header")
    batch = at + struct.unpack_from("<I", metadata, at)[0]
    num_rows = _field(metadata, batch, _NUM_ROWS, "<q")
    if num_rows < 0:
        raise ValueError(num_rows)
    return kind, body_bytes, num_rows


def _field(metadata: bytes, table: int, number: int, form: str) -> int:
    # A number in a FlatBuffers table; 0 if it is not there.
    at = _place(metadata, table, number)
    return 0 if at is None else struct.unpack_from(form, metadata, at)[0]


def _place(metadata: bytes, table: int, number: int) -> int | None:
    (back,) = struct.unpack_from("<i", metadata, table)
    layout = table - back
    if layout < 0:
        raise ValueError(layout)
    (size,) = struct.unpack_from("<H", metadata, layout)
    entry = 4 + 2 * number
    if entry >= size:
        return None
    (offset,) = struct.unpack_from("<H", metadata, layout + entry)
    return table + offset if offset else None


def _foreign(file: str, problem: object) -> errors.DataError:
    return errors.DataError(
        f"{file}: not a complete Arrow file ({problem}); {files.RESTORE}"
    )


@functools.lru_cache(maxsize=1024)
def _schema(file: str) -> pa.Schema:
    library()
    import pyarrow as pa

    with _opened(file) as stream:
        is_file = stream.read(len(_MAGIC)) == _MAGIC
        stream.seek(_FIRST_OF_FILE if is_file else 0)
        with arrow_rows.damaged(functools.partial(_foreign, file)):
            return pa.ipc.read_schema(stream)


def _opened(file: str) -> Any:
    import pyarrow as pa

    if storage.is_local(file):
        return pa.memory_map(file)
    return pa.PythonFile(files.opened(file), mode="r")


files.register_cache(_schema.cache_clear)


def library() -> Any:
    """`pyarrow`.

    Raises:
      ConfigError: if it is not installed.
    """
    return extras.module("pyarrow", extra="parquet", otherwise="use other files")
