"""A part of a step as it lies in a file: its size, its checks, and the bytes to write.

The values of a chunk have their CRC-32C behind them (`layout`); the file of a component
has nothing behind its content.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import ComponentFile, Contents, Fragment
from elastic_ckpt.tiers.source import ReadError, Source

Part = Fragment | ComponentFile

DIFFERS = "is not what was saved: its digest differs"


def num_bytes(part: Part, contents: Contents) -> int:
    """The bytes of a part with the checksum behind values.

    Args:
      part: of the step.
      contents: of the step.
    """
    if isinstance(part, ComponentFile):
        return part.stored_bytes
    dtype = contents.leaves[part.leaf].dtype
    return layout.num_bytes(part.box, dtype) + layout.CHECKSUM_BYTES


def damage(stored: np.ndarray, part: Part) -> str | None:
    """The problem of the bytes of a part; None if they are as they were saved.

    Args:
      stored: all bytes of the part, uint8 `[num_bytes]`.
      part: as a manifest lists it.

    Returns:
      The end of a sentence.
    """
    if isinstance(part, ComponentFile):
        return None if digest.values_digest(stored) == part.digest else DIFFERS
    values, stored_checksum = np.split(stored, [len(stored) - layout.CHECKSUM_BYTES])
    if digest.values_digest(values) != part.digest:
        return DIFFERS
    if checksum(values) != stored_checksum.tobytes():
        return (
            "has right values, and a wrong CRC-32C behind them: zarr readers refuse it"
        )
    return None


def why_differs(source: Source, file: str) -> str:
    """The problem of a file that was read, and had other bytes than were saved.

    While a step is read it may be removed, and its files be written anew for another.
    """
    try:
        source.size(file)
    except ReadError as error:
        return str(error)
    return DIFFERS


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
