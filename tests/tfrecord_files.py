"""TFRecord files, from the format's specification."""

import pathlib
import struct
from collections.abc import Iterable

import google_crc32c
import numpy as np

from elastic_ckpt.data.sources import record_format


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


def example(features) -> bytes:
    """A tf.Example of text, bytes, lists of bytes, and arrays of numbers."""
    example = record_format._example_class()()
    for name, value in sorted(features.items()):
        feature = example.features.feature.add(key=name).value
        if isinstance(value, str | bytes):
            value = [value]
        if isinstance(value, list):
            values = [v.encode() if isinstance(v, str) else v for v in value]
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(np.asarray(value).dtype, np.floating):
            feature.float_list.value.extend(np.ravel(value).tolist())
        else:
            feature.int64_list.value.extend(np.ravel(value).tolist())
    return example.SerializeToString(deterministic=True)
