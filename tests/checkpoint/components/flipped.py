"""Arrays of which one device holds other bits than its replicas."""

import jax
import numpy as np


def flipped(array, device, bit, *, element=0):
    """`array`, with a bit of an element flipped in the part that `device` holds."""
    parts = []
    for shard in array.addressable_shards:
        part = shard.data
        if shard.device == device:
            values = np.array(part)
            raw = values.reshape(-1).view(np.uint8)
            raw[element * values.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
            part = jax.device_put(values, device)
        parts.append(part)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_leaf(tree, number, change):
    """`tree`, with one of its leaves replaced by `change(leaf)`."""
    leaves, structure = jax.tree.flatten(tree)
    leaves[number] = change(leaves[number])
    return structure.unflatten(leaves)
