"""A part of a step as it lies in a file: its size, its checks, and the bytes to write.

The values of a chunk have their CRC-32C behind them (`layout`); the file of a component
has nothing behind its content.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers.source import ReadError, Source

DIFFERS = "is not what was saved: its digest differs"


def damage(stored: np.ndarray, leaf: Leaf, named: bytes) -> str | None:
    """The problem of the bytes of a part; None if they are as they were saved.

    Args:
      stored: all bytes of the part, uint8 `[layout.stored_bytes]`.
      leaf: that it is of.
      named: the digest of its values.

    Returns:
      The end of a sentence.
    """
    values, behind = stored, stored[:0]
    if not leaf.is_file:
        values, behind = np.split(stored, [len(stored) - layout.CHECKSUM_BYTES])
    if digest.values_digest(values) != named:
        return DIFFERS
    if len(behind) and checksum(values) != behind.tobytes():
        return (
            "has right values, and a wrong CRC-32C behind them: zarr readers refuse it"
        )
    return None


def why_differs(source: Source, leaf: Leaf, box: Box) -> str:
    """The problem of a part that was read, and had other bytes than were saved.

    While a step is read it may be removed, and its files be written anew for another.
    """
    try:
        source.size(leaf, box)
    except ReadError as error:
        return str(error)
    return DIFFERS


def content(leaf: Leaf, values: np.ndarray) -> bytes:
    """The bytes of a part in a file: its values in C order, and their checksum."""
    return values.tobytes() if leaf.is_file else chunk_content(values)


def chunk_content(values: np.ndarray) -> bytes:
    """The content of the file of a chunk: its values in C order and their checksum."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.tobytes() + checksum(flat)


def checksum(values: np.ndarray) -> bytes:
    """The CRC-32C behind the values of a chunk, as zarr's codec `crc32c` has it."""
    # It does not take memory that can be written.
    read_only = values.view()
    read_only.flags.writeable = False
    return google_crc32c.value(read_only).to_bytes(layout.CHECKSUM_BYTES, "little")
