"""A part's bytes in a file, and how to check them.

A chunk's values are followed by their CRC-32C (`layout`); a component's file is stored
unchanged.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf

DIFFERS = "is not what was saved: its digest differs"


def damage(stored: np.ndarray, leaf: Leaf, named: bytes) -> str | None:
    """The end of a sentence that describes a part's problem; None if the part is good.

    Args:
      stored: all bytes of the part, uint8.
      leaf: the leaf of the part.
      named: the expected digest of the part's values.
    """
    values = stored if leaf.is_file else stored[: -layout.CHECKSUM_BYTES]
    if digest.values_digest(values) != named:
        return DIFFERS
    if not leaf.is_file and checksum(values) != stored[len(values) :].tobytes():
        return (
            "has the right values, but the CRC-32C after them is wrong, so zarr"
            " readers reject it"
        )
    return None


def content(leaf: Leaf, values: np.ndarray) -> bytes:
    """The bytes to store for a part: its values in C order and their checksum."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.tobytes() if leaf.is_file else flat.tobytes() + checksum(flat)


def checksum(values: np.ndarray) -> bytes:
    """The CRC-32C after the values of a chunk, as zarr's codec `crc32c` writes it."""
    # google_crc32c does not accept writable memory.
    read_only = np.frombuffer(values.data.toreadonly(), np.uint8)
    return google_crc32c.value(read_only).to_bytes(layout.CHECKSUM_BYTES, "little")
