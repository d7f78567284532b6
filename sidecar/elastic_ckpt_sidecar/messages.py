"""Messages between the head and the workers, other than a run's arrays.

Colocated Python passes only JAX arrays, so the head sends a message as JSON in a uint8
array of shape `[devices, bytes]`, one copy per device. The array's sharding also
determines which devices take part. A worker replies with an array that has a row per
device.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from elastic_ckpt.core import storage

# The minimum message length; lengths are this times a power of two.
_MIN_BYTES = 512
# The longest pause between polls.
_POLL_SECS = 0.2


def encode(content: storage.Json, sharding: NamedSharding) -> jax.Array:
    """Encodes `content` for the devices of `sharding`, as one row per device."""
    text = json.dumps(content).encode()
    # Uses few lengths, because colocated Python specializes a method for each.
    num_bytes = _MIN_BYTES
    while num_bytes < len(text):
        num_bytes *= 2
    line = np.frombuffer(text.ljust(num_bytes), np.uint8)
    copies = np.broadcast_to(line, (sharding.mesh.devices.size, len(line)))
    # Not `device_put`: with multiple controllers, it compares values across hosts, and
    # a thread may send a message while a training step runs its own collectives.
    # A program may have disallowed implicit transfers, such as this one.
    with jax.transfer_guard("allow"):
        return jax.make_array_from_callback(copies.shape, sharding, lambda i: copies[i])


def decode(array: jax.Array) -> Any:
    """The inverse of `encode`."""
    return json.loads(np.asarray(array.addressable_data(0))[0].tobytes())


def decode_rows(array: jax.Array) -> list[Any]:
    """Decodes each host's result of `encode`, from the rows of its devices."""
    return [json.loads(row.tobytes()) for row in rows(array)]


def on_each(call: jax.Array, value: float) -> jax.Array:
    """Returns `value` for each device of this host: float32 `[devices]`."""
    return reply(call, lambda _: np.asarray(value, np.float32))


def reply(call: jax.Array, row: Callable[[jax.Device], np.ndarray]) -> jax.Array:
    """Returns one row for each device of this host, all of the same shape.

    The result has the shape `[devices, ...]`.
    """
    devices = [shard.device for shard in call.addressable_shards]
    own = [jax.device_put(row(device)[None], device) for device in devices]
    shape = (call.sharding.num_devices, *own[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, call.sharding, own)


def pauses() -> Iterator[None]:
    """Sleeps before each value, with growing pauses up to a limit."""
    pause = 0.001
    while True:
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECS)
        yield


def release(worker: Any, *, wait: bool = True) -> None:
    """Releases a worker, an object of a colocated class, without waiting for it.

    The wrapper of a colocated class is part of reference cycles, and its finalizer logs
    an error if it runs while the interpreter exits. So this function breaks the cycles
    earlier.
    """
    del wait
    vars(worker).clear()
    gc.collect()


def rows(array: jax.Array) -> np.ndarray:
    """Returns the rows of this process's addressable devices, in mesh order."""
    return np.concatenate([np.asarray(s.data) for s in array.addressable_shards])
