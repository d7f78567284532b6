"""Arrays in a key-value store, as TensorStore itself would write them."""

import numpy as np
import pytest
import tensorstore as ts

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.tiers.persistent import ocdbt
from tests.checkpoint.host.test_capture import random_bits

# The shapes of chunks, by those of arrays.
SHAPES = {(6,): (3,), (4, 6): (2, 3), (): ()}


def content(context, spec):
    store = ts.KvStore.open(spec, context=context).result()
    return {key: store.read(key).result().value for key in store.list().result()}


@pytest.mark.parametrize("small_bytes", [ocdbt._SMALL_BYTES, -1])
def test_what_is_stored_is_what_tensorstore_stores(small_bytes, tmp_path, monkeypatch):
    # Small chunks are encoded here, large ones by TensorStore.
    monkeypatch.setattr(ocdbt, "_SMALL_BYTES", small_bytes)
    arrays = [
        random_bits(dtype, int(np.prod(shape))).reshape(shape)
        for dtype in sorted(capture.STORABLE)
        for shape in SHAPES
    ]
    # Chunks that do not lie in one piece are stored in their order.
    arrays.append(np.arange(24, dtype=np.float32).reshape(6, 4).T)
    ours, theirs, chunks = ocdbt.new_context(), ts.Context(), []
    for number, values in enumerate(arrays):
        shape, dtype = values.shape, values.dtype.name
        path, chunk = f"state/{number}", SHAPES[values.shape]
        leaf = manifest.Leaf(path=path, shape=shape, dtype=dtype, chunk=chunk)
        for box in layout.cut(boxes.whole(shape), chunk):
            of_box = values[tuple(map(slice, box.start, box.stop))]
            chunks.append(ocdbt.Chunk(leaf=leaf, box=box, values=of_box))
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "memory", "path": f"{number}/"},
            "metadata": layout.array_metadata(leaf),
            "store_data_equal_to_fill_value": True,
        }
        ts.open(spec, create=True, context=theirs).result().write(values).result()
    ocdbt.write(tmp_path, chunks, ours)
    expected = content(theirs, {"driver": "memory"})
    assert content(ours, ocdbt.store_spec(tmp_path)) == expected
    assert len(expected) == len(chunks) + len(arrays)
