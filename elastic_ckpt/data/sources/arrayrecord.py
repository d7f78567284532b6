"""ArrayRecord files: read in blocks, or as one random-access list of records."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import grain

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data.sources import files, record_format, source

# The first bytes of every file: the constant beginning of a block's header.
_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
# The last block of a file has the offset of the footer, and a magic number.
_BLOCK_BYTES = 64 * 1024
_FOOTER_OFFSET = re.compile(
    rb"\x08([\x80-\xff]*[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71"
)
# The number of readers that a process keeps open.
_MAX_OPEN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord(record_format.RecordFiles):
    """ArrayRecord files as a source.

    Attributes:
      files: the paths or URIs of the files; a remote file is copied to this machine
        first.
      columns: of `tf_example`, the features to keep, by default all; of `bytes`, the
        name of the only column, by default `text`.
      record_format: the content of a record: `"bytes"`, or `"tf_example"` for a
        serialised `tf.train.Example`. Of that, a feature with one value of bytes is
        that value, one with several is a list of them, and numbers are float32 or int64
        of shape `[values]`.
    """

    file_type = "arrayrecord"

    def index(self, file: str) -> source.FileIndex:
        """Counts the records."""
        count = _count(files.local_copy(file))
        footer = _footer(files.local_copy(file))
        content = files.content(file)
        return source.FileIndex(
            content=content.including(digest.bytes_digest(footer)),
            block_records=source.pieces(count, content.num_bytes, source.BLOCK_RECORDS),
        )

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        index, path = source.indexes(self)[file], self.files[file]
        first = index.first_record(block)
        stop = first + int(index.block_records[block])
        return self._block(file, block, _read(path, first, stop))

    def _element(self, record: bytes | RuntimeError, place: str) -> source.Element:
        if isinstance(record, RuntimeError):
            raise source.corrupt(place, record)
        return self._decoded(record, place)


class ArrayRecordFiles:
    """The records of several files in file order, as a Grain random-access source.

    An element is `(record number, record)`: records are numbered over all files, and
    the number identifies a record as long as the files do not change.

    Raises:
      DataError: if a file cannot be read as ArrayRecord, or no file holds a record.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        indexes = source.current_indexes(ArrayRecord(files=tuple(paths)))
        self.records_per_file = tuple(index.num_records for index in indexes)
        self._files = tuple(paths)
        filled = [
            files.local_copy(file)
            for file, count in zip(self._files, self.records_per_file, strict=True)
            if count
        ]
        self._records = grain.sources.ArrayRecordDataSource(filled)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        _refuse_forked_loader()
        try:
            return index, self._records[index]
        except RuntimeError as error:
            file, first = 0, index
            while first >= self.records_per_file[file]:
                first -= self.records_per_file[file]
                file += 1
            raise errors.DataError(
                f"{self._files[file]}, record {first}: cannot be read ({error});"
                " restore the file from a copy"
            ) from None

    def __repr__(self) -> str:
        # Grain prints this in warnings and errors of a pipeline.
        return f"ArrayRecordFiles(files={len(self._files)}, records={len(self)})"


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def _refuse_forked_loader() -> None:
    # The library crashes in workers that PyTorch has forked, without a word.
    torch_data: Any = sys.modules.get("torch.utils.data")
    if _is_forked and torch_data and torch_data.get_worker_info() is not None:
        raise errors.ConfigError(
            "ArrayRecord files cannot be read in a forked worker of a PyTorch loader:"
            ' start workers by another method (multiprocessing_context="forkserver"'
            " of the loader), or read in the rank's process (num_workers=0)"
        )


@functools.lru_cache(maxsize=_MAX_OPEN)
def _reader(file: str) -> Any:
    # One for each file in a process; all readers share the library's thread pool.
    from array_record.python import array_record_module

    _refuse_forked_loader()
    reader = array_record_module.ArrayRecordReader(
        files.local_copy(file), "readahead_buffer_size:0", file_reader_buffer_size=32768
    )
    if not reader.ok():
        # The reader reports this only here; it would appear as a file without records.
        raise OSError(f"{file} cannot be opened")
    return reader


files.register_cache(_reader.cache_clear)


def _read(file: str, first: int, stop: int) -> list[bytes | RuntimeError]:
    # The records; an error for each one that cannot be read.
    try:
        return _reader(file).read(first, stop)
    except RuntimeError:
        return [_read_one(file, number) for number in range(first, stop)]


def _read_one(file: str, number: int) -> bytes | RuntimeError:
    try:
        return _reader(file).read([number])[0]
    except RuntimeError as error:
        if not os.path.exists(files.local_copy(file)):
            raise OSError(f"{file} is gone") from error
        return error


def _count(file: str) -> int:
    try:
        from array_record.python import array_record_module

        reader = array_record_module.ArrayRecordReader(file)
        count = reader.num_records()
        reader.close()
    except RuntimeError as error:
        raise errors.DataError(
            f"{file}: not a readable ArrayRecord file: {_defect(file, str(error))};"
            f" {files.RESTORE}"
        ) from None
    return count


def _footer(file: str) -> bytes:
    # The places of all chunks, up to the last block.
    with open(file, "rb") as stream:
        end = stream.seek(-_BLOCK_BYTES, os.SEEK_END)
        found = _FOOTER_OFFSET.search(stream.read(_BLOCK_BYTES))
        if found is None:
            raise errors.DataError(f"{file}: no offset of a footer; {files.RESTORE}")
        # A number of seven bits in each byte.
        offset = sum((byte & 127) << 7 * n for n, byte in enumerate(found[1]))
        stream.seek(offset)
        footer = stream.read(end - offset)
    # An offset counts from the beginning of its own file.
    if other := _FOOTER_OFFSET.search(footer):
        raise errors.DataError(
            f"{file}: another file ends in it, behind byte {offset + other.start()};"
            f" {files.JOINED}"
        )
    return footer


def _defect(file: str, detail: str) -> str:
    # ArrayRecord's own message is a parser's, or empty.
    size_bytes = os.stat(file).st_size
    with open(file, "rb") as opened:
        begin = opened.read(len(_SIGNATURE))
    if begin == _SIGNATURE:
        problem = (
            f"it is cut short, or was changed after it was written: its {size_bytes:,}"
            " bytes do not end in the footer of a complete file"
        )
    elif _SIGNATURE.startswith(begin):
        problem = f"it is cut short after {size_bytes:,} bytes"
    else:
        problem = f"it begins with {begin!r}, which is another format"
    return f"{problem} ({detail})" if detail else problem
