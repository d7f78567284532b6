"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` is what runs on one host: it loads the host's rows and places them on the
host's devices. `Batches` puts it into the training process as a plain iterator and an
Orbax `StatefulCheckpointable`; `sidecar.RemoteIterator` runs the same thing in
colocated Python.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, Sharding

from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.data import state

Batch = dict[str, jax.Array]


class HostBatches(Protocol):
    """One host's rows of each global batch, as Grain's iterators yield them."""

    def __iter__(self) -> HostBatches:
        """Itself."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def get_state(self) -> dict[str, Any]:
        """The position after the last rows, as JSON."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` gave on any host."""


class ElasticData(Protocol):
    """Data that any number of hosts can share; it has to survive cloudpickle."""

    @property
    def engine(self) -> str:
        """Names the kind of position that its batches have."""

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example comes when, named by configuration keys."""

    def host_batches(
        self, *, host: int, num_hosts: int, global_batch_size: int
    ) -> HostBatches:
        """The batches of one host."""


class AwaitedDirectory(Protocol):
    """A directory that Orbax is about to create (its `PathAwaitingCreation`)."""

    async def await_creation(self) -> epath.Path:
        """Waits until the directory exists, and returns it."""


class HostIterator:
    """Loads one host's rows and makes global arrays of them.

    Args:
      data: what to iterate over.
      sharding: how the rows of a global batch lie on devices; all devices of a host
        hold rows, and the hosts split the batch equally.
      global_batch_size: rows of a global batch, B.
    """

    def __init__(
        self, data: ElasticData, *, sharding: Sharding, global_batch_size: int
    ) -> None:
        hosts = sorted({device.process_index for device in sharding.device_set})
        self._is_writer = topology.this_host() == hosts[0]
        self._sharding = sharding
        self._global_batch_size = global_batch_size
        self._engine = data.engine
        self._identity = data.identity()
        self._rows = data.host_batches(
            host=hosts.index(topology.this_host()),
            num_hosts=len(hosts),
            global_batch_size=global_batch_size,
        )

    def next(self) -> Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        rows = next(self._rows)
        return {name: self._place(array) for name, array in rows.items()}

    def get_state(self) -> state.DataState:
        """The data state after the last batch."""
        return state.DataState(
            engine=self._engine,
            position=dict(self._rows.get_state()),
            pipeline=self._identity,
        )

    def write(self, directory: epath.PathLike, data_state: state.DataState) -> None:
        """Writes `data_state` into `directory` on the one host whose task that is."""
        if self._is_writer:
            state.write(directory, data_state)

    def load(self, directory: epath.PathLike) -> None:
        """Goes to the data state in `directory`.

        Raises:
          DataError: if it cannot be read, or is of another pipeline.
        """
        saved = state.read(directory)
        state.check_same_pipeline(saved, self._engine, self._identity)
        self._rows.set_state(dict(saved.position))

    def _place(self, rows: np.ndarray) -> jax.Array:
        shape = (self._global_batch_size, *rows.shape[1:])
        # Row ranges of this host's devices. In ascending order they are the host's
        # rows, so that rows land on the same devices every time.
        indices = self._sharding.addressable_devices_indices_map(shape)
        starts = {d: (index or (slice(None),))[0] for d, index in indices.items()}
        ranges = sorted({s.indices(shape[0])[:2] for s in starts.values()})
        offsets, taken = {}, 0
        for start, stop in ranges:
            offsets[start] = taken
            taken += stop - start
        if taken != len(rows):
            raise errors.DataError(
                f"this host's devices hold {taken} of the {shape[0]} rows of a batch,"
                f" but its iterator gave {len(rows)}"
            )
        pieces = []
        for device, part in starts.items():
            start, stop, _ = part.indices(shape[0])
            first = offsets[start]
            pieces.append(jax.device_put(rows[first : first + stop - start], device))
        return jax.make_array_from_single_device_arrays(shape, self._sharding, pieces)


class Batches:
    """The iterator in the training process itself.

    Args:
      data: what to iterate over.
      mesh: the training mesh; rows are sharded over all of its axes.
      global_batch_size: rows of a global batch, B.
    """

    def __init__(
        self, data: ElasticData, *, mesh: Mesh, global_batch_size: int
    ) -> None:
        self._host = HostIterator(
            data,
            sharding=topology.batch_sharding(mesh),
            global_batch_size=global_batch_size,
        )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        return self._host.next()

    async def save(self, directory: AwaitedDirectory) -> Awaitable[None]:
        """Takes the state now; the awaitable writes it into Orbax's directory."""
        data_state = self._host.get_state()

        async def write() -> None:
            self._host.write(await directory.await_creation(), data_state)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Goes to the data state in `directory`, on any number of hosts."""

        async def read() -> None:
            self._host.load(directory)

        return read()

    def close(self) -> None:
        """Does nothing: there is nothing to end in this process."""
