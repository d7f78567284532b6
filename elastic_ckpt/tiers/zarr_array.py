"""Zarr v3 arrays of leaves, written into a key-value store of TensorStore.

Our layout determines the stored bytes of an array: its metadata is a function of the
leaf, and a chunk is its values and their CRC-32C. So no array is read or created first,
and small chunks are encoded here: opening an array in TensorStore takes ten times as
long as writing a kilobyte.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from elastic_ckpt.core import boxes
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import stored_part

METADATA = "zarr.json"
# Larger chunks are encoded by TensorStore, in its threads.
_SMALL_BYTES = 2**17


class ArrayWriter:
    """Writes arrays into one key-value store; any thread may call it.

    Args:
      store: TensorStore's spec of the store.
      context: of TensorStore.
      transaction: that all writes belong to; nothing is durable before its commit.
    """

    def __init__(
        self,
        store: Mapping[str, Any],
        *,
        context: ts.Context,
        transaction: ts.Transaction,
    ) -> None:
        self._spec = store
        self._context = context
        self._transaction = transaction
        opened = ts.KvStore.open(dict(store), context=context).result()
        self._path = opened.path
        self._store = opened.with_transaction(transaction)

    def describe(self, prefix: str, leaf: Leaf, chunk: tuple[int, ...]) -> None:
        """Writes the metadata of an array.

        Args:
          prefix: what the keys of the array begin with.
          leaf: that it holds.
          chunk: the shape of its chunks.
        """
        content = metadata_file(leaf.shape, leaf.dtype, chunk)
        self._store.write(prefix + METADATA, content)

    def write(
        self,
        prefix: str,
        leaf: Leaf,
        chunk: tuple[int, ...],
        box: boxes.Box,
        values: np.ndarray,
    ) -> None:
        """Writes a chunk of an array.

        Args:
          prefix: what the keys of the array begin with.
          leaf: that it holds.
          chunk: the shape of its chunks.
          box: that is one of them.
          values: which must not change before the commit.
        """
        if values.nbytes <= _SMALL_BYTES:
            key = prefix + layout.chunk_key(box, chunk)
            self._store.write(key, stored_part.chunk_content(values))
            return
        array = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": self._path + prefix},
                "metadata": layout.array_metadata(leaf.shape, leaf.dtype, chunk),
                # Chunks of zeros are stored as well: a chunk that is missing is lost.
                "store_data_equal_to_fill_value": True,
            },
            open=True,
            assume_metadata=True,
            context=self._context,
            transaction=self._transaction,
        ).result()
        place = tuple(map(slice, box.start, box.stop))
        writing = array[place].write(
            values, can_reference_source_data_indefinitely=True
        )
        writing.copy.result()


@functools.lru_cache(maxsize=2**14)
def metadata_file(shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...]) -> bytes:
    """The `zarr.json` of an array, as TensorStore writes it.

    Args:
      shape: of the array.
      dtype: NumPy's name.
      chunk: the shape of its chunks.
    """
    context = ts.Context()
    spec = {"driver": "zarr3", "kvstore": "memory://"}
    metadata = layout.array_metadata(shape, dtype, chunk)
    ts.open({**spec, "metadata": metadata}, create=True, context=context).result()
    store = ts.KvStore.open(spec["kvstore"], context=context).result()
    return bytes(store.read(METADATA).result().value)
