"""The metadata of zarr v3 arrays, which our layout determines.

An array's metadata is a function of the leaf, and a chunk is its values and their
CRC-32C. So no array is read or created before it is written.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorstore as ts

from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf

METADATA = "zarr.json"


def metadata_file(leaf: Leaf) -> bytes:
    """The `zarr.json` of an array, as TensorStore writes it."""
    return _metadata_file(dataclasses.replace(leaf, path=""))


@functools.lru_cache(maxsize=2**14)
def _metadata_file(leaf: Leaf) -> bytes:
    context = ts.Context()
    spec = {"driver": "zarr3", "kvstore": "memory://"}
    metadata = layout.array_metadata(leaf)
    ts.open({**spec, "metadata": metadata}, create=True, context=context).result()
    store = ts.KvStore.open(spec["kvstore"], context=context).result()
    return bytes(store.read(METADATA).result().value)
