"""TFRecord files; every checksum is verified.

A record is its length (uint64, little-endian), the masked CRC-32C of these eight bytes,
the data, and the data's masked CRC-32C (TensorFlow's `record_writer.h`). Finding the
records requires a pass over all lengths (`offset_index`). A reader compares the end of
each block with the index.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator
from typing import BinaryIO

import google_crc32c

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, offset_index, record_format, source

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 12
_FOOTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecord(record_format.RecordFiles):
    """Uncompressed TFRecord files as a source.

    Attributes:
      files: the paths or URIs of the files.
      columns: of `tf_example`, the features to keep, by default all; of `bytes`, the
        name of the only column, by default `text`.
      record_format: the content of a record: `"bytes"`, or `"tf_example"` for a
        serialised `tf.train.Example`. Of that, a feature with one value of bytes is
        that value, one with several is a list of them, and numbers are float32 or int64
        of shape `[values]`.
    """

    file_type = "tfrecord"
    record_format: str = record_format.TF_EXAMPLE

    def index(self, file: str) -> source.FileIndex:
        """The offsets of the blocks, from the cache or from a pass over the file."""
        return offset_index.index("tfrecord", file, functools.partial(_walk, file))

    def decode(self, file: int, block: int) -> source.Block:
        """See `Source`."""
        return self._block(file, block, _records(self._content(file, block)))

    def _element(self, record: bytes, place: str) -> source.Element:
        data = record[:-_FOOTER_BYTES]
        if _masked_crc(data) != _CRC.unpack_from(record, len(data))[0]:
            raise source.corrupt(place, "its checksum differs")
        return self._decoded(data, place)


def _records(content: bytes) -> Iterator[bytes]:
    # The data of each record, with its checksum.
    at = 0
    while at < len(content):
        begin = at + _HEADER_BYTES
        header = content[at:begin]
        if not _is_header(header):
            # Without its length, the next record cannot be found.
            raise source.LostError(f"not the length of a record, at {at} of a block")
        at = begin + _LENGTH.unpack_from(header)[0] + _FOOTER_BYTES
        if at > len(content):
            raise source.LostError("cut short")
        yield content[begin:at]


def _is_header(header: bytes) -> bool:
    if len(header) < _HEADER_BYTES:
        return False
    return _masked_crc(header[:8]) == _CRC.unpack_from(header, 8)[0]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _walk(file: str, stream: BinaryIO, num_bytes: int) -> Iterator[int]:
    offset = 0
    while offset < num_bytes:
        stream.seek(offset)
        header = stream.read(_HEADER_BYTES)
        if not _is_header(header):
            raise errors.DataError(_foreign(file, offset, header))
        yield offset
        offset += _HEADER_BYTES + _LENGTH.unpack_from(header)[0] + _FOOTER_BYTES
    if offset != num_bytes:
        raise errors.DataError(
            f"{file}: cut short in its last record, after {num_bytes} bytes; restore it"
            " from a copy"
        )


def _foreign(file: str, offset: int, header: bytes) -> str:
    if offset == 0 and header[:2] in (b"\x1f\x8b", b"\x78\x9c"):
        return (
            f"{file}: a compressed file, which is not supported; decompress it, or"
            " write it again without compression"
        )
    return (
        f"{file}, byte {offset}: not a TFRecord file, or damaged there; {files.RESTORE}"
    )
