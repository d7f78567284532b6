"""The index of an OCDBT store: which bytes of which files are the value of a key.

TensorStore writes values and index together. An index that is written here refers to
values that lie in files already.

    manifest.ocdbt          refers to the root
    nodes/<32 hex digits>   leaves of keys, and a root of leaves if there are several

Spec: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import google_crc32c
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import ocdbt

_NODES = "nodes"
_NODE, _ROOT = 0x0CDB20DE, 0x0CDB3A2A
_LEAF_KEYS = 2**14
# As TensorStore chooses them for a new store.
_MOST_INLINE_BYTES, _MOST_NODE_BYTES, _ARITY_LOG2 = 100, 8 * 2**20, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """A range of a file: the bytes of a value, or of a node.

    Attributes:
      file: the path of a file, from the store's directory.
      offset: of the first byte.
      num_bytes: how many.
    """

    file: str
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Subtree:
    first: bytes
    extent: Extent
    num_keys: int
    tree_bytes: int
    value_bytes: int


def write(directory: epath.Path, values: Mapping[str, Extent]) -> None:
    """Writes the index of a store, durably, in place of an earlier one.

    Args:
      directory: of the store.
      values: the extents of the values, by key; one at least.

    Raises:
      OSError: if storage fails.
    """
    file = f"{_NODES}/{secrets.token_hex(16)}"
    nodes, manifest = _encoded(values, file)
    storage.write_atomic(directory / file, nodes)
    storage.write_atomic(directory / ocdbt.MANIFEST, manifest)
    for child in (directory / _NODES).iterdir():
        if f"{_NODES}/{child.name}" != file:
            storage.remove(child)


def read(directory: epath.PathLike, context: ts.Context) -> dict[str, Extent]:
    """The extents of the values of a local store that are not in its nodes, by key.

    Raises:
      ValueError: if there is no index, or it is damaged.
    """
    path = os.path.abspath(directory) + "/"
    base = ts.KvStore.open({"driver": "file", "path": path}).result()
    versions = ts.ocdbt.dump(base, context=context).result()["versions"]
    values: dict[str, Extent] = {}
    pending = [("", versions[-1]["root"].get("location"))]
    while pending:
        prefix, location = pending.pop()
        if location is None:
            continue
        node: Any = ts.ocdbt.dump(base, location, context=context).result()
        for entry in node["entries"]:
            key = prefix + entry["key"].decode()
            if "location" in entry:
                common = entry["subtree_common_prefix"].decode()
                pending.append((prefix + common, entry["location"]))
            elif "indirect_value" in entry:
                values[key] = _parsed(entry["indirect_value"])
    return values


def _encoded(values: Mapping[str, Extent], nodes_file: str) -> tuple[bytes, bytes]:
    # The content of the file of nodes, and of the manifest.
    keys = sorted((key.encode(), extent) for key, extent in values.items())
    nodes = bytearray()

    def appended(first: bytes, node: bytes, below: Sequence[_Subtree]) -> _Subtree:
        extent = Extent(file=nodes_file, offset=len(nodes), num_bytes=len(node))
        nodes.extend(node)
        return _Subtree(
            first=first,
            extent=extent,
            num_keys=sum(each.num_keys for each in below),
            tree_bytes=len(node) + sum(each.tree_bytes for each in below),
            value_bytes=sum(each.value_bytes for each in below),
        )

    leaves = []
    for start in range(0, len(keys), _LEAF_KEYS):
        some = keys[start : start + _LEAF_KEYS]
        size = sum(extent.num_bytes for _, extent in some)
        leaf = appended(some[0][0], _leaf(some), ())
        leaf = dataclasses.replace(leaf, num_keys=len(some), value_bytes=size)
        leaves.append(leaf)
    root = leaves[0]
    if len(leaves) > 1:
        root = appended(root.first, _interior(leaves), leaves)
    return bytes(nodes), _manifest(root, height=int(len(leaves) > 1))


def _parsed(location: str) -> Extent:
    # Such as `value::d/0123:16:4`.
    _, above, name, offset, num_bytes = location.split(":")
    return Extent(file=above + name, offset=int(offset), num_bytes=int(num_bytes))


def _leaf(keys: Sequence[tuple[bytes, Extent]]) -> bytes:
    extents = [extent for _, extent in keys]
    files = sorted({extent.file for extent in extents})
    numbers = {file: number for number, file in enumerate(files)}
    body = [
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


def _interior(children: Sequence[_Subtree]) -> bytes:
    # The keys of the children are whole: they have no common prefix here.
    common_prefixes = file_numbers = bytes(len(children))
    body = [
        b"\1",
        _file_table([children[0].extent.file]),
        _varints([len(children)]),
        _names([each.first for each in children], common_prefixes),
        file_numbers,
        _varints(each.extent.offset for each in children),
        _varints(each.extent.num_bytes for each in children),
        _varints(each.num_keys for each in children),
        _varints(each.tree_bytes for each in children),
        _varints(each.value_bytes for each in children),
    ]
    return _framed(_NODE, b"".join(body))


def _manifest(root: _Subtree, *, height: int) -> bytes:
    generation, file = 1, 0
    body = [
        secrets.token_bytes(16),
        # One file of this kind, and nodes that are not compressed.
        _varints([0, _MOST_INLINE_BYTES, _MOST_NODE_BYTES]),
        bytes([_ARITY_LOG2, 0]),
        _file_table([root.extent.file]),
        _varints([1, generation]),
        bytes([height]),
        _varints([file, root.extent.offset, root.extent.num_bytes]),
        _varints([root.num_keys, root.tree_bytes, root.value_bytes]),
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
