"""Letters: what the head says to workers, and they to it, besides the arrays of a run.

Colocated Python passes JAX arrays alone. Whatever else the head says travels as a
letter: JSON in a uint8 array of shape `[devices, bytes]`, one copy a device, whose
sharding also tells the worker which devices take part. What workers say comes back as
an array with a row of each device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from elastic_ckpt.core import storage

# The shortest letter; the length of each is a power of two of them.
_LETTER_BYTES = 512


def letter(content: storage.Json, sharding: NamedSharding) -> jax.Array:
    """`content` for every device of `sharding`, which shards rows over all its axes."""
    text = json.dumps(content).encode()
    # Few lengths, since colocated Python specializes a method for each.
    num_bytes = _LETTER_BYTES
    while num_bytes < len(text):
        num_bytes *= 2
    line = np.frombuffer(text.ljust(num_bytes), np.uint8)
    copies = np.broadcast_to(line, (sharding.mesh.devices.size, len(line)))
    # Not `device_put`: across controllers it compares values over all hosts, and a
    # letter may be sent from a thread beside the training step's own collectives.
    return jax.make_array_from_callback(copies.shape, sharding, lambda i: copies[i])


def open_letter(array: jax.Array) -> Any:
    """What `letter` put into `array`."""
    return json.loads(np.asarray(array.addressable_data(0))[0].tobytes())


def on_each(call: jax.Array, value: float) -> jax.Array:
    """`value` from this host, for each of its devices: float32 `[devices]`."""
    shape = (call.sharding.num_devices,)
    own = np.full(1, value, np.float32)
    return jax.make_array_from_callback(shape, call.sharding, lambda _: own)


def answer(call: jax.Array, row: Callable[[jax.Device], np.ndarray]) -> jax.Array:
    """A row from each device that is here, all of one shape: `[devices, ...]`."""
    sharding = call.sharding
    assert isinstance(sharding, NamedSharding)
    devices = sharding.mesh.devices.flat
    shape = (len(devices), *row(call.addressable_shards[0].device).shape)

    def of_index(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        (number,) = range(len(devices))[index[0]]
        return row(devices[number])[None]

    return jax.make_array_from_callback(shape, sharding, of_index)


def rows(array: jax.Array) -> np.ndarray:
    """The rows of those devices that this process can ask, in the order of the mesh."""
    return np.concatenate([np.asarray(s.data) for s in array.addressable_shards])
