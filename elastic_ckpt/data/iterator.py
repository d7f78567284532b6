"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` is what runs on one host: it loads the host's rows and places them on the
host's devices. `Batches` puts it into the training process as a plain iterator and an
Orbax `StatefulCheckpointable`; `RemoteIterator` runs the same thing in
colocated Python.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import time
from collections.abc import Awaitable, Sequence
from typing import Protocol

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, metrics, topology
from elastic_ckpt.data import (
    compatibility,
    cursors,
    delivery,
    elastic_data,
    prefetch,
    rows,
    state,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostState:
    """What one host saves: the data state, and the cursors of its logical shards."""

    data_state: state.DataState
    cursors: cursors.Cursors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a host is: the position, and the cursors of every shard that it runs."""

    position: cursors.Position
    cursors: cursors.Cursors


class AwaitedDirectory(Protocol):
    """A directory that Orbax is about to create (its `PathAwaitingCreation`)."""

    async def await_creation(self) -> epath.Path:
        """Waits until the directory exists, and returns it."""


class HostIterator:
    """Loads one host's rows and makes global arrays of them.

    Args:
      data: what to iterate over.
      sharding: how a global batch lies on devices; see `delivery.RowsHeld` and
        `delivery.feature_sharding`.
      global_batch_size: rows of a global batch, B.
      read_ahead: how far to read, and place on the devices, ahead of `next`.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        sharding: NamedSharding,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead = prefetch.TWO_BATCHES,
    ) -> None:
        held = delivery.RowsHeld.of(sharding, global_batch_size)
        me = topology.this_host()
        if me not in held.holders:
            raise errors.ConfigError(
                f"no device of host {me} is in the mesh, so it has no rows to load;"
                " make the mesh of devices of every host"
            )
        if held.unused:
            logging.warning(
                "hosts share some rows of a batch and not all, and load up to %d of %d"
                " rows that their devices do not hold; order the mesh's devices so that"
                " those of a host hold the same rows",
                held.unused,
                global_batch_size,
            )
        # Hosts with the same rows count as one, and the first of them writes for it.
        self._writes_cursors = held.first_holder(me) == me
        self._writes_state = self._writes_cursors and held.groups[0] == held.holders[me]
        self._data = data
        self._sharding = sharding
        self._identity = data.identity()
        self._global_batch_size = global_batch_size
        self._read_ahead = read_ahead
        self._rows = self._begin(global_batch_size)
        self.waited_secs = 0.0

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
        mark = self.mark()

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - mark.cursors.keys())
            if missing:
                raise errors.ConfigError(
                    f"going from batches of {self._global_batch_size} rows to"
                    f" {global_batch_size} moves logical shards {missing} between"
                    " hosts; choose multiples of num_logical_shards, or change the size"
                    " at a restart"
                )
            return {shard: mark.cursors[shard] for shard in shards}

        resized = self._begin(global_batch_size)
        resized.go_to(mark.position, read)
        self._rows.close()
        self._rows, self._global_batch_size = resized, global_batch_size

    def close(self) -> None:
        """Ends what reads ahead."""
        self._rows.close()

    def next(self) -> elastic_data.Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        began = time.monotonic()
        batch = next(self._rows)
        self.waited_secs = time.monotonic() - began
        return batch

    def num_ready(self) -> int:
        """Batches that are on the devices already."""
        return self._rows.num_ready()

    def explain(self, waited_secs: float) -> str:
        """Why the loop has just waited so long, in words."""
        return (
            f"waited {waited_secs:.1f} s for a batch: {compatibility.host_name()} did"
            " not have its rows ready"
        )

    def mark(self) -> Mark:
        """Where it is after the last batch."""
        return Mark(
            position=self._rows.position(),
            cursors=dict(self._rows.shard_cursors(shared=True)),
        )

    def return_to(self, mark: Mark) -> None:
        """Goes back to where it was."""
        self._rows.go_to(
            mark.position, lambda shards: {s: mark.cursors[s] for s in shards}
        )

    def get_state(self, mark: Mark | None = None) -> HostState:
        """What to save after the last batch, or at a mark."""
        mark = mark or self.mark()
        data_state = state.DataState(
            engine=self._data.engine, position=mark.position, pipeline=self._identity
        )
        own = self._rows.shard_cursors()
        return HostState(
            data_state=data_state, cursors={shard: mark.cursors[shard] for shard in own}
        )

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
        data = self._data.continuing(saved.pipeline)
        identity = self._identity if data is self._data else data.identity()
        state.check_same_pipeline(saved, data.engine, identity)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            return cursors.read(directory, shards, saved.position)

        if data is self._data:
            self._rows.go_to(saved.position, read)
            return
        renamed = self._begin(self._global_batch_size, data)
        renamed.go_to(saved.position, read)
        self._rows.close()
        self._data, self._identity, self._rows = data, identity, renamed

    def _begin(
        self, global_batch_size: int, data: elastic_data.ElasticData | None = None
    ) -> prefetch.Prefetched[elastic_data.Batch]:
        held = delivery.RowsHeld.of(self._sharding, global_batch_size)
        group = held.group(topology.this_host())
        placement = rows.Placement(row_hosts=held.row_hosts(), host=group)
        return prefetch.Prefetched(
            (data or self._data).host_batches(placement),
            make=_Placer(self._sharding, global_batch_size, held.groups[group]),
            read_ahead=self._read_ahead,
        )


# What JAX makes of integers without jax_enable_x64.
_NARROWED = {np.dtype("int64"): "int32", np.dtype("uint64"): "uint32"}


class _Placer:
    """Puts a host's rows on its devices, the same on the same ones every time."""

    def __init__(
        self,
        sharding: NamedSharding,
        global_batch_size: int,
        host_rows: tuple[int, ...],
    ) -> None:
        self._sharding = sharding
        self._global_batch_size = global_batch_size
        self._host_rows = host_rows

    def __call__(self, loaded: dict[str, np.ndarray]) -> elastic_data.Batch:
        for name, feature in loaded.items():
            _check_fits(name, feature)
        return {name: self._place(name, feature) for name, feature in loaded.items()}

    def _place(self, name: str, feature: np.ndarray) -> jax.Array:
        if len(feature) != len(self._host_rows):
            raise errors.DataError(
                f"this host loads {len(self._host_rows)} of the"
                f" {self._global_batch_size} rows of a batch, but its iterator gave"
                f" {len(feature)}"
            )

        def part_at(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(self._global_batch_size)
            # The rows of a device follow each other in those of its host.
            first = bisect.bisect_left(self._host_rows, start)
            return feature[first : first + stop - start, *index[1:]]

        shape = (self._global_batch_size, *feature.shape[1:])
        sharding = delivery.feature_sharding(self._sharding, name, shape)
        return jax.make_array_from_callback(shape, sharding, part_at)


def _check_fits(name: str, feature: np.ndarray) -> None:
    # Without jax_enable_x64 JAX would keep the low half of a large number.
    dtype = _NARROWED.get(feature.dtype)
    wide = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]
    if dtype is None or wide or not feature.size:
        return
    limits = np.iinfo(dtype)
    for value in (feature.min(), feature.max()):
        if not limits.min <= value <= limits.max:
            raise errors.DataError(
                f"feature {name!r} has the value {value}, and JAX would hold it as"
                f" {dtype}; make it smaller, or set jax_enable_x64"
            )


class Batches:
    """The iterator in the training process itself.

    Args:
      data: what to iterate over.
      mesh: the training mesh.
      spec: how a batch is sharded over it; see `ec.batches`.
      global_batch_size: rows of a global batch, B.
      read_ahead: how far each host reads ahead of the loop.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        mesh: Mesh,
        spec: PartitionSpec | None = None,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead = prefetch.TWO_BATCHES,
    ) -> None:
        self._sharding = topology.batch_sharding(mesh, spec)
        compatibility.check_controllers(data, mesh)
        self._host = HostIterator(
            data,
            sharding=self._sharding,
            global_batch_size=global_batch_size,
            read_ahead=read_ahead,
        )
        self._deliver = delivery.Delivery(
            data,
            sharding=self._sharding,
            global_batch_size=global_batch_size,
            warn_after_secs=read_ahead.warn_after_secs,
        )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> elastic_data.Batch:
        return self._deliver(self._host)

    def reset(self) -> None:
        """Goes to the beginning."""
        self._host.reset()
        self._deliver.begin()

    def resize(self, global_batch_size: int) -> None:
        """Goes on with batches of another size; see `HostIterator.resize`."""
        self._host.resize(global_batch_size)
        self._deliver.resize(global_batch_size)

    async def save(self, directory: AwaitedDirectory) -> Awaitable[None]:
        """Takes the state now; the awaitable writes it into Orbax's directory."""
        began = time.monotonic()
        with metrics.DATA_SAVE_BLOCK.timed():
            taken = self._host.get_state()

        async def write() -> None:
            path = await directory.await_creation()
            await asyncio.to_thread(self._host.write, path, taken)
            metrics.DATA_SAVE.record(time.monotonic() - began)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Goes to the data state in `directory`, on any number of hosts.

        That is done at once: an error of the awaitable would reach the caller of Orbax
        as one of an incompatible handler.
        """
        with metrics.DATA_LOAD.timed():
            await asyncio.to_thread(self._host.load, directory)
        self._deliver.begin()
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Ends what reads ahead."""
        self._host.close()
