"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` is what runs on one host: it loads the host's rows and places them on the
host's devices. `Batches` puts it into the training process as a plain iterator and an
Orbax `StatefulCheckpointable`; `sidecar.RemoteIterator` runs the same thing in
colocated Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, Sharding

from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.data import cursors, rows, state

Batch = dict[str, jax.Array]


# Reads the cursors of the given shards, whoever saved them.
ReadCursors = Callable[[Sequence[int]], cursors.Cursors]


class HostBatches(Protocol):
    """One host's rows of each global batch."""

    def __iter__(self) -> HostBatches:
        """Itself."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def position(self) -> cursors.Position:
        """The position after the last rows, the same on every host."""

    def shard_cursors(self) -> cursors.Cursors:
        """The cursors of the logical shards that this host has, as they are now."""

    def go_to(self, position: cursors.Position, read: ReadCursors) -> None:
        """Goes to a position of any host, reading the cursors that it needs here."""


class ElasticData(Protocol):
    """Data that any number of hosts can share; it has to survive cloudpickle."""

    @property
    def engine(self) -> str:
        """Names the kind of position that its batches have."""

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example comes when, named by configuration keys."""

    def host_batches(self, placement: rows.Placement) -> HostBatches:
        """The batches of one host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostState:
    """What one host saves: the data state, and the cursors of its logical shards."""

    data_state: state.DataState
    cursors: cursors.Cursors


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
        holders = row_holders(sharding, global_batch_size)
        groups = sorted(set(holders.values()), key=lambda held: held[0])
        mine = holders[topology.this_host()]
        # Hosts with the same rows count as one, and the first of them writes for it.
        writer = min(host for host, held in holders.items() if held == mine)
        self._writes_cursors = writer == topology.this_host()
        self._writes_state = self._writes_cursors and groups[0] == mine
        self._sharding = sharding
        self._global_batch_size = global_batch_size
        self._engine = data.engine
        self._identity = data.identity()
        row_hosts = np.full(global_batch_size, -1)
        for number, held in enumerate(groups):
            row_hosts[list(held)] = number
        self._rows = data.host_batches(
            rows.Placement(row_hosts=row_hosts, host=groups.index(mine))
        )

    def next(self) -> Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        loaded = next(self._rows)
        return {name: self._place(array) for name, array in loaded.items()}

    def get_state(self) -> HostState:
        """What to save after the last batch."""
        data_state = state.DataState(
            engine=self._engine,
            position=self._rows.position(),
            pipeline=self._identity,
        )
        return HostState(data_state=data_state, cursors=self._rows.shard_cursors())

    def write(self, directory: epath.PathLike, taken: HostState) -> None:
        """Writes this host's part of the state `taken` into `directory`."""
        if self._writes_cursors:
            cursors.write(directory, taken.cursors, taken.data_state.position)
        if self._writes_state:
            state.write(directory, taken.data_state)

    def load(self, directory: epath.PathLike) -> None:
        """Goes to the data state in `directory`, of any number of hosts.

        Raises:
          DataError: if it cannot be read, or is of another pipeline.
        """
        saved = state.read(directory)
        state.check_same_pipeline(saved, self._engine, self._identity)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            return cursors.read(directory, shards, saved.position)

        self._rows.go_to(saved.position, read)

    def _place(self, loaded: np.ndarray) -> jax.Array:
        shape = (self._global_batch_size, *loaded.shape[1:])
        # Row ranges of this host's devices. In ascending order they are the host's
        # rows, so that rows land on the same devices every time.
        indices = self._sharding.addressable_devices_indices_map(shape)
        starts = {d: (index or (slice(None),))[0] for d, index in indices.items()}
        ranges = sorted({s.indices(shape[0])[:2] for s in starts.values()})
        offsets, taken = {}, 0
        for start, stop in ranges:
            offsets[start] = taken
            taken += stop - start
        if taken != len(loaded):
            raise errors.DataError(
                f"this host's devices hold {taken} of the {shape[0]} rows of a batch,"
                f" but its iterator gave {len(loaded)}"
            )
        pieces = []
        for device, part in starts.items():
            start, stop, _ = part.indices(shape[0])
            first = offsets[start]
            pieces.append(jax.device_put(loaded[first : first + stop - start], device))
        return jax.make_array_from_single_device_arrays(shape, self._sharding, pieces)


def row_holders(
    sharding: Sharding, global_batch_size: int
) -> dict[int, tuple[int, ...]]:
    """The rows of a batch that the devices of each host hold, by process number.

    Raises:
      ConfigError: if two hosts share some of their rows and not all.
    """
    held: dict[int, set[int]] = {}
    shape = (global_batch_size,)
    for device, index in sharding.devices_indices_map(shape).items():
        part = (index or (slice(None),))[0]
        held.setdefault(device.process_index, set()).update(
            range(*part.indices(global_batch_size))
        )
    holders = {host: tuple(sorted(of_host)) for host, of_host in held.items()}
    distinct = set(holders.values())
    if sum(map(len, distinct)) != global_batch_size:
        raise errors.ConfigError(
            f"the sharding {sharding} gives hosts overlapping rows of a batch; shard"
            " the rows so that two hosts have the same rows or none in common"
        )
    return holders


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
        taken = self._host.get_state()

        async def write() -> None:
            self._host.write(await directory.await_creation(), taken)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Goes to the data state in `directory`, on any number of hosts."""

        async def read() -> None:
            self._host.load(directory)

        return read()

    def close(self) -> None:
        """Does nothing: there is nothing to end in this process."""
