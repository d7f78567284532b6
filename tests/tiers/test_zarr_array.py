"""Arrays in a key-value store, as TensorStore itself would write them."""

import numpy as np
import pytest
import tensorstore as ts

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.tiers.persistent import ocdbt
from tests.checkpoint.host.test_capture import random_bits

SHAPES = {"vector": ((6,), (3,)), "matrix": ((4, 6), (2, 3)), "number": ((), ())}


def stored(directory, dtype, shape, chunk, values):
    """The content that `ocdbt.write` stores for an array, by key."""
    context = ocdbt.new_context()
    leaf = manifest.Leaf(path="state/w", shape=shape, dtype=dtype, chunk=chunk)
    chunks = [
        ocdbt.Chunk(
            leaf=leaf,
            box=box,
            values=values[tuple(map(slice, box.start, box.stop))],
        )
        for box in layout.cut(boxes.whole(shape), chunk)
    ]
    ocdbt.write(directory, chunks, context)
    found = content(context, ocdbt.store_spec(directory))
    return {key.removeprefix(b"w/"): value for key, value in found.items()}


def by_tensorstore(dtype, shape, chunk, values):
    """The content that TensorStore stores for it."""
    context = ts.Context()
    leaf = manifest.Leaf(path="w", shape=shape, dtype=dtype, chunk=chunk)
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": "w/"},
            "metadata": layout.array_metadata(leaf),
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        context=context,
    ).result()
    array.write(values).result()
    return content(context, {"driver": "memory", "path": "w/"})


def content(context, spec):
    opened = ts.KvStore.open(spec, context=context).result()
    keys = opened.list().result()
    return {key: bytes(opened.read(key).result().value) for key in keys}


@pytest.mark.parametrize("small_bytes", [ocdbt._SMALL_BYTES, -1])
def test_what_is_stored_is_what_tensorstore_stores(small_bytes, tmp_path, monkeypatch):
    # Small chunks are encoded here, large ones by TensorStore.
    monkeypatch.setattr(ocdbt, "_SMALL_BYTES", small_bytes)
    for dtype in sorted(capture.STORABLE):
        for name, (shape, chunk) in SHAPES.items():
            directory = tmp_path / dtype / name
            size = int(np.prod(shape))
            values = random_bits(dtype, size).reshape(shape)
            expected = by_tensorstore(dtype, shape, chunk, values)
            assert stored(directory, dtype, shape, chunk, values) == expected
            assert len(expected) == 1 + size // max(1, int(np.prod(chunk)))
    # Chunks that do not lie in one piece are stored in their order.
    values = np.arange(24, dtype=np.float32).reshape(6, 4).T
    expected = by_tensorstore("float32", (4, 6), (2, 3), values)
    assert stored(tmp_path / "order", "float32", (4, 6), (2, 3), values) == expected
