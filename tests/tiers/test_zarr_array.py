"""Arrays in a key-value store, as TensorStore itself would write them."""

import numpy as np
import pytest
import tensorstore as ts

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.tiers import zarr_array
from tests.checkpoint.host.test_capture import random_bits

SHAPES = {"vector": ((6,), (3,)), "matrix": ((4, 6), (2, 3)), "number": ((), ())}


def stored(dtype, shape, chunk, values):
    """The content that an `ArrayWriter` stores for an array, by key."""
    context = ts.Context()
    spec = {"driver": "memory", "path": "below/"}
    writes = ts.Transaction(atomic=False)
    writer = zarr_array.ArrayWriter(spec, context=context, transaction=writes)
    leaf = manifest.Leaf(path="w", shape=shape, dtype=dtype)
    writer.describe("w/", leaf, chunk)
    for box in layout.cut(boxes.whole(shape), chunk):
        part = values[tuple(map(slice, box.start, box.stop))]
        writer.write("w/", leaf, chunk, box, part)
    writes.commit_sync()
    return content(context, "below/w/")


def by_tensorstore(dtype, shape, chunk, values):
    """The content that TensorStore stores for it."""
    context = ts.Context()
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": "w/"},
            "metadata": layout.array_metadata(shape, dtype, chunk),
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        context=context,
    ).result()
    array.write(values).result()
    return content(context, "w/")


def content(context, path):
    store = ts.KvStore.open({"driver": "memory", "path": path}, context=context)
    opened = store.result()
    keys = opened.list().result()
    return {key: bytes(opened.read(key).result().value) for key in keys}


@pytest.mark.parametrize("small_bytes", [zarr_array._SMALL_BYTES, -1])
def test_what_is_stored_is_what_tensorstore_stores(small_bytes, monkeypatch):
    # Small chunks are encoded here, large ones by TensorStore.
    monkeypatch.setattr(zarr_array, "_SMALL_BYTES", small_bytes)
    for dtype in sorted(capture.STORABLE):
        for shape, chunk in SHAPES.values():
            size = int(np.prod(shape))
            values = random_bits(dtype, size).reshape(shape)
            expected = by_tensorstore(dtype, shape, chunk, values)
            assert stored(dtype, shape, chunk, values) == expected
            assert len(expected) == 1 + size // max(1, int(np.prod(chunk)))
    # Chunks that do not lie in one piece are stored in their order.
    values = np.arange(24, dtype=np.float32).reshape(6, 4).T
    expected = by_tensorstore("float32", (4, 6), (2, 3), values)
    assert stored("float32", (4, 6), (2, 3), values) == expected
