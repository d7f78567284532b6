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
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import google_crc32c
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files, offset_index, record_format, source

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 12
_FOOTER_BYTES = 4
# The size of a read.
_BUFFER_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecord(record_format.RecordFiles):
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

    def read(self, unit: units.Unit, skip: int) -> Iterator[source.Read]:
        """Reads the records of a unit, a block or a part of one, from number `skip`."""
        decode = record_format.decoder(self.record_format, self.columns)
        file = self.files[unit.file]
        index = source.indexes(self)[unit.file]
        offset = index.block_bytes[unit.block]
        before = unit.first + skip
        number = unit.block * source.BLOCK_RECORDS
        left = unit.num_records - skip
        while left:
            try:
                records, offset = files.retried(
                    functools.partial(
                        _read_run, file, offset, before=before, limit=left
                    ),
                    f"{file}, byte {offset}",
                )
            except source.CorruptError as error:
                yield error
                return
            number += before
            for data, crc in records:
                place = f"{file}, record {number}"
                if _masked_crc(data) != crc:
                    yield source.corrupt(place, "its checksum differs")
                else:
                    yield record_format.decoded(decode, data, place)
                number += 1
            left -= len(records)
            before = 0
        ends_block = unit.first + unit.num_records == unit.block_records
        end = index.end_bytes(unit.block)
        if ends_block and skip < unit.num_records and offset != end:
            raise errors.DataError(
                f"{file}: block {unit.block} ends at byte {offset}, but at byte"
                f" {end} in the file's index: the file has changed during"
                " the run; restore it from a copy, and start the run again"
            )


def write(path: epath.PathLike, records: Iterable[bytes]) -> None:
    """Writes `records` as a TFRecord file; it appears whole or not at all."""
    with storage.atomic_path(path) as temporary, open(temporary, "wb") as file:
        for data in records:
            length = _LENGTH.pack(len(data))
            file.write(length + _CRC.pack(_masked_crc(length)))
            file.write(data + _CRC.pack(_masked_crc(data)))


def _read_run(
    file: str, offset: int, *, before: int, limit: int
) -> tuple[list[tuple[bytes, int]], int]:
    # Skips `before` records, then reads about a buffer of records with their checksums.
    # Also returns the offset of the next record.
    records: list[tuple[bytes, int]] = []
    taken_bytes = 0
    with files.opened(file) as stream:
        stream.seek(offset)
        while before:
            length = _read_length(stream, file, offset, limit)
            offset += _HEADER_BYTES + length + _FOOTER_BYTES
            stream.seek(offset)
            before -= 1
        while len(records) < limit and taken_bytes < _BUFFER_BYTES:
            try:
                length = _read_length(stream, file, offset, limit)
                data = stream.read(length + _FOOTER_BYTES)
                if len(data) < length + _FOOTER_BYTES:
                    raise _lost(file, offset, limit)
            except source.CorruptError:
                # The records before it are returned first.
                if records:
                    break
                raise
            records.append((data[:length], _CRC.unpack_from(data, length)[0]))
            offset += _HEADER_BYTES + length + _FOOTER_BYTES
            taken_bytes += length
    return records, offset


def _read_length(stream: BinaryIO, file: str, offset: int, left: int) -> int:
    header = stream.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not _is_header(header):
        raise _lost(file, offset, left)
    return _LENGTH.unpack_from(header)[0]


def _lost(file: str, offset: int, left: int) -> source.CorruptError:
    # Without its length, the next record of the block cannot be found.
    return source.corrupt(
        f"{file}, byte {offset}",
        "not the length of a record, or cut short; later records of this block cannot"
        " be found",
        num_records=left,
    )


def _is_header(header: bytes) -> bool:
    return _masked_crc(header[:8]) == _CRC.unpack_from(header, 8)[0]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _walk(file: str, num_bytes: int) -> offset_index.Offsets:
    starts: list[int] = []
    offset, count = 0, 0
    with files.opened(file) as stream:
        while offset < num_bytes:
            stream.seek(offset)
            header = stream.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES or not _is_header(header):
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
    advice = files.route(file, own=(".tfrecord", ".tfrecords"))
    return f"{file}, byte {offset}: not a TFRecord file, or damaged there; {advice}"
