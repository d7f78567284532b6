"""Reads blocks of ArrayRecord files."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from typing import Any

from elastic_ckpt.core import digest, errors
from elastic_ckpt.data.sources import files, record_format, source

# A file's last block has the footer's offset and a magic number.
_RIEGELI_BLOCK_BYTES = 64 * 1024
_FOOTER_OFFSET = re.compile(
    rb"\x08([\x80-\xff]*[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71"
)
# Maximum number of readers that a process keeps open.
_MAX_OPEN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord(record_format.RecordFiles):
    """ArrayRecord files as a source.

    Attributes:
      files: the paths or URIs of the files; a remote file is copied to this machine
        first.
      columns: for `tf_example`, the features to keep, by default all; for `bytes`, the
        name of the only column, by default `text`.
      record_format: the content of a record: `"bytes"`, or `"tf_example"` for a
        serialized `tf.train.Example`. A feature with one bytes value becomes this
        value, multiple bytes values become a list, and numbers become a float32 or
        int64 array of shape `[values]`.
    """

    file_type = "arrayrecord"
    _is_kept = False

    def _find(self, file: str) -> source.Found:
        try:
            count = _reader(file).num_records()
        except RuntimeError as error:
            raise source.foreign(file, "ArrayRecord", error) from None
        num_bytes = os.path.getsize(files.local_copy(file))
        records = source.pieces(count, num_bytes, source.BLOCK_RECORDS)
        return source.Found(digest.bytes_digest(_footer(file)), records)

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


# The process that loaded this module.
_LOADED_IN = os.getpid()


def _refuse_forked_loader() -> None:
    # The library would crash silently in workers that PyTorch has forked.
    torch_data: Any = sys.modules.get("torch.utils.data")
    is_forked = os.getpid() != _LOADED_IN
    if is_forked and torch_data and torch_data.get_worker_info() is not None:
        raise errors.ConfigError(
            "ArrayRecord files cannot be read in a forked worker of a PyTorch loader;"
            " start the workers with a different method (pass"
            ' multiprocessing_context="forkserver" to the loader), or read in the'
            " rank's process (num_workers=0)"
        )


@functools.lru_cache(maxsize=_MAX_OPEN)
def _opened(file: str) -> Any:
    # The readers of a process share the library's thread pool.
    from array_record.python import array_record_module

    local = files.local_copy(file)
    with open(local, "rb"):
        # Opened only for a precise error, which the reader does not raise.
        reader = array_record_module.ArrayRecordReader(
            local, "readahead_buffer_size:0", file_reader_buffer_size=32768
        )
    if not reader.ok():
        # Otherwise, it would look like a file without records.
        raise RuntimeError("it cannot be opened")
    return reader


files.register_cache(_opened.cache_clear)


def _reader(file: str) -> Any:
    _refuse_forked_loader()
    return _opened(file)


def _read(file: str, first: int, stop: int) -> list[bytes | RuntimeError]:
    # The records, with an error in place of each one that cannot be read.
    try:
        return _reader(file).read(first, stop)
    except RuntimeError:
        return [_read_one(file, number) for number in range(first, stop)]


def _read_one(file: str, number: int) -> bytes | RuntimeError:
    try:
        return _reader(file).read([number])[0]
    except RuntimeError as error:
        return error


def _footer(file: str) -> bytes:
    # The bytes from the footer to the end. The footer has all chunk offsets.
    with open(files.local_copy(file), "rb") as stream:
        end = stream.seek(-_RIEGELI_BLOCK_BYTES, os.SEEK_END)
        found = _FOOTER_OFFSET.search(stream.read(_RIEGELI_BLOCK_BYTES))
        if found is None:
            raise source.foreign(file, "ArrayRecord", "it has no footer offset")
        # A varint: seven bits in each byte.
        stream.seek(sum((byte & 127) << 7 * n for n, byte in enumerate(found[1])))
        footer = stream.read(end - stream.tell())
    # In joined files, the offset is relative to the beginning of the last file.
    if _FOOTER_OFFSET.search(footer):
        raise source.foreign(file, "ArrayRecord", "another file ends inside it")
    return footer
