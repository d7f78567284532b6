"""The head's handle of the data iterators that run beside the accelerator hosts."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Awaitable
from typing import Any

import jax
from etils import epath
from jax.experimental import colocated_python
from jax.sharding import Mesh

from elastic_ckpt.core import topology
from elastic_ckpt.data import iterator
from sidecar import worker


class RemoteIterator:
    """Global batches from workers in colocated Python; they write their own state.

    To a training loop it is an iterator, to Orbax v1 a `StatefulCheckpointable`: the
    state goes from the worker's host into the step's temporary directory, before Orbax
    commits the step, and never passes through the head.

    Args:
      data: what to iterate over.
      mesh: the training mesh; rows are sharded over all of its axes.
      global_batch_size: rows of a global batch, B.
    """

    def __init__(
        self, data: iterator.ElasticData, *, mesh: Mesh, global_batch_size: int
    ) -> None:
        self._sharding = topology.batch_sharding(mesh)
        self._cpu_sharding = topology.batch_sharding(
            colocated_python.colocated_cpu_devices(mesh)
        )
        self._tickets = itertools.count()
        self._next_call = worker.letter({}, self._cpu_sharding)
        self._data = data
        self._deliver = iterator.Delivery(
            data, sharding=self._sharding, global_batch_size=global_batch_size
        )
        self._worker = worker.Worker(data, global_batch_size)
        # Also at the end of the program, should nobody call `close`.
        self._release = weakref.finalize(self, _release, self._worker)

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> iterator.Batch:
        return self._deliver(self._load)

    def reset(self) -> None:
        """Has the workers go to the beginning."""
        self._call(self._worker.reset)

    def resize(self, global_batch_size: int) -> None:
        """Has the workers go on with batches of another size."""
        self._call(self._worker.resize, global_batch_size=global_batch_size)
        self._deliver = iterator.Delivery(
            self._data, sharding=self._sharding, global_batch_size=global_batch_size
        )

    async def save(self, directory: iterator.AwaitedDirectory) -> Awaitable[None]:
        """Has the workers take their state now, and write it in the background."""
        ticket = next(self._tickets)
        self._call(self._worker.take_state, ticket=ticket)

        async def write() -> None:
            path = await directory.await_creation()
            self._call(self._worker.write_state, ticket=ticket, directory=str(path))

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Has the workers go to the state in `directory`, on any number of hosts."""

        async def read() -> None:
            self._call(self._worker.load_state, directory=str(directory))

        return read()

    def close(self) -> None:
        """Lets go of the workers; the iterator cannot be used any more."""
        if self._release.alive:
            self._call(self._worker.close)
        self._release()

    def _load(self) -> iterator.Batch:
        batch = jax.block_until_ready(self._worker.next(self._next_call))
        return topology.place(batch, self._sharding)

    def _call(self, method: Any, **content: Any) -> None:
        jax.block_until_ready(method(worker.letter(content, self._cpu_sharding)))


def _release(wrapper: Any) -> None:
    # The wrapper of a colocated class sits in reference cycles, and its finalizer
    # fails, loudly, when it first runs in a dying interpreter: so break the cycles
    # before.
    vars(wrapper).clear()
    gc.collect()
