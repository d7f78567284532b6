"""TFRecord files, with every checksum verified.

A record is its length (uint64, little-endian), the masked CRC-32C of these eight bytes,
the data, and the data's masked CRC-32C (TensorFlow's `record_writer.h`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import BinaryIO

import google_crc32c

from elastic_ckpt.data.sources import record_format, source

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 12
_FOOTER_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecord(record_format.RecordFiles, source.WalkedFiles):
    """Uncompressed TFRecord files as a source.

    Attributes:
      files: the paths or URIs of the files.
      columns: for `tf_example`, the features to keep, by default all; for `bytes`, the
        name of the only column, by default `text`.
      record_format: the content of a record: `"bytes"`, or `"tf_example"` for a
        serialized `tf.train.Example`. A feature with one bytes value becomes this
        value, multiple bytes values become a list, and numbers become a float32 or
        int64 array of shape `[values]`.
    """

    file_type = "tfrecord"
    record_format: str = record_format.TF_EXAMPLE

    def _records(
        self, file: str, stream: BinaryIO, *, is_whole: bool
    ) -> Iterator[tuple[int, bytes]]:
        # The data of each record, followed by its checksum.
        del file, is_whole
        start = 0
        while header := stream.read(_HEADER_BYTES):
            if not _is_header(header):
                # Without a length, the next record cannot be found.
                raise source.LostError(
                    f"it has no record length at byte {start}; compressed files are not"
                    " supported"
                )
            (num_bytes,) = _LENGTH.unpack_from(header)
            record = stream.read(num_bytes + _FOOTER_BYTES)
            if len(record) < num_bytes + _FOOTER_BYTES:
                raise source.LostError("its last record is truncated")
            yield start, record
            start += _HEADER_BYTES + len(record)

    def _element(self, record: bytes, place: str) -> source.Element:
        data = record[:-_FOOTER_BYTES]
        if _masked_crc(data) != _CRC.unpack_from(record, len(data))[0]:
            raise source.corrupt(place, "its checksum does not match")
        return self._decoded(data, place)


def _is_header(header: bytes) -> bool:
    if len(header) < _HEADER_BYTES:
        return False
    return _masked_crc(header[:8]) == _CRC.unpack_from(header, 8)[0]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
