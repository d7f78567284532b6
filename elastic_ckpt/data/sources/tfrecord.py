"""TFRecord files; every checksum is verified.

A record is its length (uint64, little-endian), the masked CRC-32C of these eight bytes,
the data, and the data's masked CRC-32C (TensorFlow's `record_writer.h`). Finding the
records requires a pass over all lengths, for an index of the blocks of 1,024 records
(`offset_index`). A reader compares the end of each block with the index.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Generator
from typing import BinaryIO

import google_crc32c

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import files, offset_index, record_format, runs, source

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 12
_FOOTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecord(record_format.RecordFiles, runs.RunFiles):
    """Uncompressed TFRecord files as a source; a block is 1,024 records.

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

    def _records(
        self, file: str, offset: int, before: int
    ) -> Generator[tuple[tuple[bytes, int], int, int]]:
        # The data of each record, and its checksum.
        with files.opened(file) as stream:
            stream.seek(offset)
            while True:
                header = stream.read(_HEADER_BYTES)
                if not _is_header(header):
                    break
                length = _LENGTH.unpack_from(header)[0]
                end = offset + _HEADER_BYTES + length + _FOOTER_BYTES
                if before:
                    stream.seek(end)
                    before -= 1
                else:
                    data = stream.read(length + _FOOTER_BYTES)
                    if len(data) < length + _FOOTER_BYTES:
                        break
                    record = data[:length], _CRC.unpack_from(data, length)[0]
                    yield record, length, end
                offset = end
        # Without its length, the next record of the block cannot be found.
        raise runs.LostError(
            "not the length of a record, or cut short; later records of this block"
            " cannot be found",
            f"byte {offset}",
        )

    def _place(self, number: int, offset: int) -> str:
        del number
        return f"byte {offset}"

    def _element(self, record: tuple[bytes, int], place: str) -> source.Read:
        data, crc = record
        if _masked_crc(data) != crc:
            return source.corrupt(place, "its checksum differs")
        return self._decoded(data, place)

    def _check_end(
        self, file: str, index: source.FileIndex, block: int, end: int
    ) -> None:
        expected = index.end_bytes(block)
        if end != expected:
            raise errors.DataError(
                f"{file}: block {block} ends at byte {end}, but at byte {expected} in"
                " the file's index: the file has changed during the run; restore it"
                " from a copy, and start the run again"
            )


def _is_header(header: bytes) -> bool:
    if len(header) < _HEADER_BYTES:
        return False
    return _masked_crc(header[:8]) == _CRC.unpack_from(header, 8)[0]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _walk(file: str, stream: BinaryIO, num_bytes: int) -> offset_index.Offsets:
    starts: list[int] = []
    offset, count = 0, 0
    while offset < num_bytes:
        stream.seek(offset)
        header = stream.read(_HEADER_BYTES)
        if not _is_header(header):
            raise errors.DataError(_foreign(file, offset, header))
        if count % source.BLOCK_RECORDS == 0:
            starts.append(offset)
        offset += _HEADER_BYTES + _LENGTH.unpack_from(header)[0] + _FOOTER_BYTES
        count += 1
    if offset != num_bytes:
        raise errors.DataError(
            f"{file}: cut short in record {count - 1} (after {num_bytes} bytes);"
            " restore it from a copy"
        )
    return starts, source.blocks(count).tolist()


def _foreign(file: str, offset: int, header: bytes) -> str:
    if offset == 0 and header[:2] in (b"\x1f\x8b", b"\x78\x9c"):
        return (
            f"{file}: a compressed file, which is not supported; decompress it, or"
            " write it again without compression"
        )
    return (
        f"{file}, byte {offset}: not a TFRecord file, or damaged there; {files.RESTORE}"
    )
