"""TFRecord files, from the format's specification."""

import pathlib
import struct
from collections.abc import Iterable

import google_crc32c


def write(path, records: Iterable[bytes]) -> None:
    pathlib.Path(path).write_bytes(b"".join(map(framed, records)))


def framed(data: bytes) -> bytes:
    """A record with its length and checksums."""
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    return length + crcs[0] + data + crcs[1]


def masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32
