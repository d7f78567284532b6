"""The index of an OCDBT store: which bytes of which files are the value of a key.

TensorStore writes values and index together, and copies values several times into fresh
memory: a conversion takes two to three times as long. An index that is written here
refers to values that lie in files already.

    manifest.ocdbt          refers to the root
    nodes                   the root, a leaf with all keys

Spec: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence

import google_crc32c
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import ocdbt

_NODES = "nodes"
_NODE, _ROOT = 0x0CDB20DE, 0x0CDB3A2A
# As TensorStore chooses them for a new store.
_MOST_INLINE_BYTES, _MOST_NODE_BYTES, _ARITY_LOG2 = 100, 8 * 2**20, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file: the bytes of a value.

    Attributes:
      file: the path of a file, from the store's directory.
      offset: of the first byte.
      num_bytes: how many.
    """

    file: str
    offset: int
    num_bytes: int


def write(directory: epath.Path, values: Mapping[str, Extent]) -> None:
    """Writes the index of a store, durably.

    Args:
      directory: of the store.
      values: the extents of the values, by key; one at least.

    Raises:
      OSError: if storage fails, or another of `bucket_clients.failures`.
    """
    root = _root(values)
    storage.write_atomic(directory / _NODES, root)
    size = sum(extent.num_bytes for extent in values.values())
    manifest = _manifest(len(root), num_keys=len(values), value_bytes=size)
    storage.write_atomic(directory / ocdbt.MANIFEST, manifest)


def _root(values: Mapping[str, Extent]) -> bytes:
    keys = sorted((key.encode(), extent) for key, extent in values.items())
    extents = [extent for _, extent in keys]
    files = sorted({extent.file for extent in extents})
    numbers = {file: number for number, file in enumerate(files)}
    body = [
        # Its height.
        b"\0",
        _file_table(files),
        _varints([len(keys)]),
        _names([key for key, _ in keys]),
        _varints(extent.num_bytes for extent in extents),
        # Not in the node.
        b"\1" * len(extents),
        _varints(numbers[extent.file] for extent in extents),
        _varints(extent.offset for extent in extents),
    ]
    return _framed(_NODE, b"".join(body))


def _manifest(root_bytes: int, *, num_keys: int, value_bytes: int) -> bytes:
    generation, file, offset, height = 1, 0, 0, 0
    body = [
        secrets.token_bytes(16),
        # One file of this kind, and nodes that are not compressed.
        _varints([0, _MOST_INLINE_BYTES, _MOST_NODE_BYTES]),
        bytes([_ARITY_LOG2, 0]),
        _file_table([_NODES]),
        _varints([1, generation]),
        bytes([height]),
        _varints([file, offset, root_bytes, num_keys, root_bytes, value_bytes]),
        time.time_ns().to_bytes(8, "little"),
        # No older versions.
        _varints([0]),
    ]
    return _framed(_ROOT, b"".join(body))


def _framed(magic: int, body: bytes) -> bytes:
    # Version 0, not compressed.
    head = magic.to_bytes(4, "big")
    length = len(head) + 8 + 2 + len(body) + 4
    content = head + length.to_bytes(8, "little") + b"\0\0" + body
    return content + google_crc32c.value(content).to_bytes(4, "little")


def _file_table(files: Sequence[str]) -> bytes:
    # Nodes that these files have refer to files by paths from the same directory.
    bases = bytes(len(files))
    return _varints([len(files)]) + _names([each.encode() for each in files], bases)


def _names(names: Sequence[bytes], column: bytes = b"") -> bytes:
    # Each whole, without what it has in common with the one before; a column of another
    # number of each is between their lengths and their bytes.
    prefixes = bytes(len(names) - 1)
    return prefixes + _varints(map(len, names)) + column + b"".join(names)


def _varints(numbers: Iterable[int]) -> bytes:
    content = bytearray()
    for number in numbers:
        while number > 0x7F:
            content.append(number & 0x7F | 0x80)
            number >>= 7
        content.append(number)
    return bytes(content)
