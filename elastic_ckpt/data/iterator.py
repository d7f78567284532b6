"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` is what runs on one host: it loads the host's rows and places them on the
host's devices. `Batches` puts it into the training process as a plain iterator and an
Orbax `StatefulCheckpointable`; `sidecar.RemoteIterator` runs the same thing in
colocated Python.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.data import cursors, rows, state

Batch = dict[str, jax.Array]

# The feature that tells real rows from padding, in data that ends.
MASK = "mask"

# Reads the cursors of the given shards, whoever saved them.
ReadCursors = Callable[[Sequence[int]], cursors.Cursors]


class End(enum.Enum):
    """How data ends.

    PADDED: with the last real row; what is missing of the last batch is zeros, and
    `mask` tells them apart. DROPPED: with the last batch of which every row is real.
    """

    NEVER = "never"
    PADDED = "padded"
    DROPPED = "dropped"


class HostBatches(Protocol):
    """One host's rows of each global batch."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays of shape `[rows of the host, ...]`."""

    def position(self) -> cursors.Position:
        """The position after the last rows, the same on every host."""

    def shard_cursors(self, *, shared: bool = False) -> cursors.Cursors:
        """The cursors of the logical shards that this host saves, as they are now.

        With `shared` also of those that it runs, and another host saves.
        """

    def go_to(self, position: cursors.Position, read: ReadCursors) -> None:
        """Goes to a position of any host, reading the cursors that it needs here."""

    def close(self) -> None:
        """Ends threads and processes that read ahead; `go_to` opens it again."""


class ElasticData(Protocol):
    """Data that any number of hosts can share; it has to survive cloudpickle."""

    @property
    def engine(self) -> str:
        """Names the kind of position that its batches have."""

    @property
    def end(self) -> End:
        """How it ends; if it does, batches have the feature `mask`, bool `[B]`."""

    @property
    def rows_of_end(self) -> int:
        """Rows of padding, one after the other, behind which there is no real one."""

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example comes when, named by configuration keys."""

    def row_order(self, row_hosts: np.ndarray) -> np.ndarray | None:
        """Where each row of a batch stands in what the hosts load; None if in place."""

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
        held = RowsHeld.of(sharding, global_batch_size)
        me = topology.this_host()
        # Hosts with the same rows count as one, and the first of them writes for it.
        self._writes_cursors = held.first_holder(me) == me
        self._writes_state = self._writes_cursors and held.groups[0] == held.holders[me]
        self._data = data
        self._sharding = sharding
        self._identity = data.identity()
        self._global_batch_size = global_batch_size
        self._rows = self._begin(global_batch_size)

    def reset(self) -> None:
        """Goes to the beginning."""
        self._rows.close()
        self._rows = self._begin(self._global_batch_size)

    def resize(self, global_batch_size: int) -> None:
        """Goes on with batches of another size.

        Raises:
          ConfigError: if hosts would have to hand shards to each other, which goes
            through a checkpoint; nothing is changed then.
        """
        position = self._rows.position()
        own = self._rows.shard_cursors(shared=True)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - own.keys())
            if missing:
                raise errors.ConfigError(
                    f"going from batches of {self._global_batch_size} rows to"
                    f" {global_batch_size} moves logical shards {missing} between"
                    " hosts; choose multiples of num_logical_shards, or change the size"
                    " at a restart"
                )
            return {shard: own[shard] for shard in shards}

        resized = self._begin(global_batch_size)
        resized.go_to(position, read)
        self._rows.close()
        self._rows, self._global_batch_size = resized, global_batch_size

    def close(self) -> None:
        """Ends what reads ahead."""
        self._rows.close()

    def next(self) -> Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        loaded = next(self._rows)
        return {name: self._place(array) for name, array in loaded.items()}

    def get_state(self) -> HostState:
        """What to save after the last batch."""
        data_state = state.DataState(
            engine=self._data.engine,
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
        state.check_same_pipeline(saved, self._data.engine, self._identity)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            return cursors.read(directory, shards, saved.position)

        self._rows.go_to(saved.position, read)

    def _begin(self, global_batch_size: int) -> HostBatches:
        held = RowsHeld.of(self._sharding, global_batch_size)
        group = held.group(topology.this_host())
        placement = rows.Placement(row_hosts=held.row_hosts(), host=group)
        return self._data.host_batches(placement)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsHeld:
    """Which rows of a batch the devices of each host hold.

    Attributes:
      holders: the rows of each process, ascending, by process number.
      groups: the distinct ones of these, ordered by their first row; hosts that hold
        the same rows are one group, and count as one host.
    """

    holders: dict[int, tuple[int, ...]]
    groups: list[tuple[int, ...]]

    @classmethod
    def of(cls, sharding: Sharding, global_batch_size: int) -> RowsHeld:
        """The rows that `sharding` gives to each host.

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
        groups = sorted(set(holders.values()), key=lambda group: group[0])
        if sum(map(len, groups)) != global_batch_size:
            raise errors.ConfigError(
                f"the sharding {sharding} gives hosts overlapping rows of a batch;"
                " shard the rows so that two hosts have the same rows or none in common"
            )
        return cls(holders=holders, groups=groups)

    def group(self, host: int) -> int:
        """The group of a host."""
        return self.groups.index(self.holders[host])

    def first_holder(self, host: int) -> int:
        """The first host that holds the rows of `host`."""
        mine = self.holders[host]
        return min(other for other, held in self.holders.items() if held == mine)

    def row_hosts(self) -> np.ndarray:
        """The group that holds each row, int `[B]`."""
        found = np.full(sum(map(len, self.groups)), -1)
        for number, held in enumerate(self.groups):
            found[list(held)] = number
        return found


def batches_of_end(data: ElasticData, global_batch_size: int) -> int:
    """Batches without a real row, one after the other, that mean the end of `data`.

    A batch that is all padding is otherwise passed over: the shards that it takes rows
    from have ended, others may not.
    """
    if data.end is not End.PADDED:
        return 1
    return -(-data.rows_of_end // global_batch_size)


class Delivery:
    """What is left to do with a global batch on devices before a loop may have it.

    Puts rows into the places of a one-host batch, if hosts load others than they hold;
    and ends data that is finite at the same batch on every host. Both are computations
    over all devices, so every host has to call it, in the same order.

    Args:
      data: what the batches are of.
      sharding: how their rows lie on devices.
      global_batch_size: rows of a global batch, B.
    """

    def __init__(
        self, data: ElasticData, *, sharding: NamedSharding, global_batch_size: int
    ) -> None:
        held = RowsHeld.of(sharding, global_batch_size)
        order = data.row_order(held.row_hosts())
        self._exchange: Callable[[Batch], Batch] | None = None
        if order is not None:
            self._exchange = jax.jit(
                lambda batch: jax.tree.map(lambda leaf: leaf[order], batch),
                out_shardings=sharding,
            )
        self._goes_on: Callable[[jax.Array], jax.Array] | None = None
        self._batches_of_end = batches_of_end(data, global_batch_size)
        if data.end is not End.NEVER:
            replicated = NamedSharding(sharding.mesh, PartitionSpec())
            test = jnp.any if data.end is End.PADDED else jnp.all
            self._goes_on = jax.jit(test, out_shardings=replicated)

    def __call__(self, load: Callable[[], Batch]) -> Batch:
        """The next batch that the loop gets, of those that `load` returns.

        Raises:
          StopIteration: if the data has ended.
        """
        for _ in range(self._batches_of_end):
            batch = load()
            if self._goes_on is None or bool(self._goes_on(batch[MASK])):
                return self._exchange(batch) if self._exchange else batch
        raise StopIteration


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
        self._data = data
        self._sharding = topology.batch_sharding(mesh)
        self._host = HostIterator(
            data, sharding=self._sharding, global_batch_size=global_batch_size
        )
        self._deliver = Delivery(
            data, sharding=self._sharding, global_batch_size=global_batch_size
        )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        return self._deliver(self._host.next)

    def reset(self) -> None:
        """Goes to the beginning."""
        self._host.reset()

    def resize(self, global_batch_size: int) -> None:
        """Goes on with batches of another size; see `HostIterator.resize`."""
        self._host.resize(global_batch_size)
        self._deliver = Delivery(
            self._data, sharding=self._sharding, global_batch_size=global_batch_size
        )

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
        """Ends what reads ahead."""
        self._host.close()
