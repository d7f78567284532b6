"""The worker: one object on each accelerator host that iterates over the data.

Colocated Python passes JAX arrays alone. Whatever else the head says travels as a
letter: JSON in a uint8 array of shape `[devices, bytes]`, one copy a device, whose
sharding also tells the worker which devices take part.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import NamedSharding

from elastic_ckpt.core import storage
from elastic_ckpt.data import iterator

# A letter's length is a multiple of this.
_LETTER_BYTES = 512


def letter(content: storage.Json, sharding: NamedSharding) -> jax.Array:
    """`content` for every device of `sharding`, which shards rows over all its axes."""
    text = json.dumps(content).encode()
    # Few lengths, since colocated Python specializes a method for each.
    padded = text + b" " * (-len(text) % _LETTER_BYTES)
    line = np.frombuffer(padded, np.uint8)
    copies = np.broadcast_to(line, (sharding.mesh.devices.size, len(line)))
    # Not `device_put`: across controllers it compares values over all hosts, and a
    # letter may be sent from a thread beside the training step's own collectives.
    return jax.make_array_from_callback(copies.shape, sharding, lambda i: copies[i])


def open_letter(array: jax.Array) -> storage.Json:
    """What `letter` put into `array`."""
    return json.loads(np.asarray(array.addressable_data(0))[0].tobytes())


class _HostWorker:
    """Iterates on one host; made there, at the first call that reaches it.

    Args:
      data: what to iterate over.
      global_batch_size: rows of a global batch.
    """

    def __init__(self, data: iterator.ElasticData, global_batch_size: int) -> None:
        self._data = data
        self._global_batch_size = global_batch_size
        self._iterator: iterator.HostIterator | None = None
        self._taken: dict[int, iterator.HostState] = {}

    def next(self, call: jax.Array) -> iterator.Batch:
        """The next global batch on the devices of `call`."""
        return self._on(call).next()

    def take_state(self, call: jax.Array) -> jax.Array:
        """Keeps the state after the last batch under the ticket that `call` names."""
        self._taken[_field(call, "ticket")] = self._on(call).get_state()
        return call

    def write_state(self, call: jax.Array) -> jax.Array:
        """Writes the state kept under a ticket into a directory, and forgets it."""
        taken = self._taken.pop(_field(call, "ticket"))
        self._on(call).write(_field(call, "directory"), taken)
        return call

    def load_state(self, call: jax.Array) -> jax.Array:
        """Goes to the state in a directory."""
        self._on(call).load(_field(call, "directory"))
        return call

    def reset(self, call: jax.Array) -> jax.Array:
        """Goes to the beginning."""
        self._on(call).reset()
        return call

    def resize(self, call: jax.Array) -> jax.Array:
        """Goes on with batches of the size that `call` names."""
        self._on(call).resize(_field(call, "global_batch_size"))
        return call

    def close(self, call: jax.Array) -> jax.Array:
        """Ends what reads ahead."""
        self._on(call).close()
        return call

    def _on(self, call: jax.Array) -> iterator.HostIterator:
        if self._iterator is None:
            self._iterator = iterator.HostIterator(
                self._data,
                sharding=call.sharding,
                global_batch_size=self._global_batch_size,
            )
        return self._iterator


def _field(call: jax.Array, name: str) -> Any:
    content = open_letter(call)
    assert isinstance(content, dict)
    return content[name]


Worker: Any = colocated_python.colocated_python_class(_HostWorker)
