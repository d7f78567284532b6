"""A part of a step as it lies in a file: its size, its checks, and the bytes to write.

The values of a chunk have their CRC-32C behind them (`layout`); the file of a component
has nothing behind its content.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf

DIFFERS = "is not what was saved: its digest differs"


def damage(stored: np.ndarray, leaf: Leaf, named: bytes) -> str | None:
    """The problem of the bytes of a part; None if they are as they were saved.

    Args:
      stored: all bytes of the part, uint8.
      leaf: that it is of.
      named: the digest of its values.

    Returns:
      The end of a sentence.
    """
    values = stored if leaf.is_file else stored[: -layout.CHECKSUM_BYTES]
    if digest.values_digest(values) != named:
        return DIFFERS
    if not leaf.is_file and checksum(values) != stored[len(values) :].tobytes():
        return (
            "has right values, and a wrong CRC-32C behind them: zarr readers refuse it"
        )
    return None


def content(leaf: Leaf, values: np.ndarray) -> bytes:
    """The bytes of a part in a file: its values in C order, and their checksum."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.tobytes() if leaf.is_file else flat.tobytes() + checksum(flat)


def checksum(values: np.ndarray) -> bytes:
    """The CRC-32C behind the values of a chunk, as zarr's codec `crc32c` has it."""
    # It does not take memory that can be written.
    read_only = np.frombuffer(values.data.toreadonly(), np.uint8)
    return google_crc32c.value(read_only).to_bytes(layout.CHECKSUM_BYTES, "little")
