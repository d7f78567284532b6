"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` runs on each host: it loads the host's rows and places them on the host's
devices. `Batches` wraps it in the training process as a plain iterator and an Orbax
`StatefulCheckpointable`; `RemoteIterator` runs it in colocated Python.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import allgather, errors, metrics, topology
from elastic_ckpt.data import (
    compatibility,
    cursors,
    delivery,
    elastic_data,
    prefetch,
    rows,
    stages,
    state,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostState:
    """The state of one host.

    Attributes:
      data_state: the data state, the same on all hosts.
      cursors: the cursors of all logical shards that the host runs.
    """

    data_state: state.DataState
    cursors: cursors.Cursors


# How long hosts wait for each other when the batches change: a host may come to that
# step later than others by the time that one of its reads takes.
CHANGE_SECS = 600.0


def check_alike(sharding: NamedSharding, course: stages.Course, after: str) -> None:
    """Raises a ConfigError unless all processes of a mesh continue alike.

    Args:
      sharding: of a batch.
      course: how this process continues.
      after: what the last batch of this process is.
    """
    hosts = tuple(delivery.rows_held(sharding, course.size))
    own = f"after {after} in batches of {course.size} rows"
    all_hosts = allgather.shared(hosts).gather("resize", own, timeout_secs=CHANGE_SECS)
    for host, other in zip(hosts, all_hosts, strict=False):
        if other != own:
            raise errors.ConfigError(
                f"host {topology.this_host()} is to continue {own}, but host {host}"
                f" {other}; call resize after the same batch on every host, with the"
                " same arguments"
            )


class AwaitedDirectory(Protocol):
    """A directory that Orbax is about to create (its `PathAwaitingCreation`)."""

    async def await_creation(self) -> epath.Path:
        """Waits until the directory exists, and returns it."""


class HostIterator:
    """Loads one host's rows and makes global arrays of them.

    Args:
      data: the data.
      sharding: the sharding of a global batch; see `delivery.feature_sharding`.
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
        self.course = stages.Course.first(data, global_batch_size)
        self._sharding = sharding
        placements = self._placements(self.course)
        if topology.this_host() not in placements:
            raise errors.ConfigError(
                f"no device of host {topology.this_host()} is in the mesh, so it has no"
                " rows to load; make the mesh from devices of every host"
            )
        delivery.warn_of_shared_shards(data, placements.values())
        self._identity = data.identity()
        self._read_ahead = read_ahead
        self._rows = self._begin(self.course)
        self._load_nothing()
        self.waited_secs = 0.0

    def reset(self) -> None:
        """Moves to the beginning."""
        self._rows.close()
        self.course = stages.Course.first(self.course.data, self.course.base_size)
        self._rows = self._begin(self.course)
        self._load_nothing()

    def _load_nothing(self) -> None:
        self.left_out: state.Ranges = ()
        # At the beginning no shard has a cursor.
        self._loaded_row: int = 0
        self._read: elastic_data.ReadCursors = dict.fromkeys

    def go_on(self, course: stages.Course) -> None:
        """Continues with batches of another size, or in another stage.

        Every host of the mesh calls it after the same batch.

        Args:
          course: one after the same batch as the present one.

        Raises:
          ConfigError: if the batch does not divide over the mesh, or if a host would
            have to run other logical shards than before, unless the state was just
            loaded. Nothing has changed then.
        """
        now = self.get_state()
        num_shards = course.data.num_shards
        placements = self._placements(course)
        for host, before in self._placements(self.course).items() if num_shards else ():
            runs = before.shards(num_shards)
            runs_then = placements[host].shards(num_shards)
            moving = np.setdiff1d(runs_then, runs).tolist()
            if moving and now.data_state.row != self._loaded_row:
                raise errors.ConfigError(
                    f"in batches of {course.size} rows logical shards {moving} move to"
                    f" host {host}, which has not run them; save, and continue from"
                    " there in batches of this size, or choose a number of logical"
                    f" shards and sizes that the {len(placements)} hosts divide"
                )

        def read(shards: Sequence[int]) -> cursors.Cursors:
            others = [shard for shard in shards if shard not in now.cursors]
            own = {s: now.cursors[s] for s in shards if s in now.cursors}
            return own if not others else own | dict(self._read(others))

        self._move(course, now.data_state.position, read)

    def close(self) -> None:
        """Stops reading ahead."""
        self._rows.close()

    def next(self) -> elastic_data.Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        began = time.monotonic()
        batch = next(self._rows)
        self.waited_secs = time.monotonic() - began
        return batch

    def num_ready(self) -> int:
        """The number of batches that are already on the devices."""
        return self._rows.num_ready()

    def explain(self, waited_secs: float) -> str:
        """A message with the reason for the last wait."""
        return (
            f"waited {waited_secs:.1f} s for a batch: {compatibility.host_name()} did"
            " not have its rows ready"
        )

    def get_state(self) -> HostState:
        """The state after the last batch."""
        return HostState(
            data_state=state.DataState(
                engine=self.course.data.engine,
                position=self._rows.position(),
                pipeline=self._identity,
                left_out=self.left_out,
                progress=self.course.progress,
            ),
            cursors=self._rows.shard_cursors(),
        )

    def to_save(self, taken: HostState) -> HostState:
        """The part of a state that this host saves; one host saves each cursor."""
        saves = delivery.saved_shards(
            self._sharding, self.course.size, self.course.data.num_shards
        )
        me = topology.this_host()
        own = {s: each for s, each in taken.cursors.items() if saves[s] == me}
        return dataclasses.replace(taken, cursors=own)

    def set_state(self, taken: HostState) -> None:
        """Moves back to a state since the last load or change of size or stage."""
        self._move(
            self.course.with_progress(taken.data_state.progress),
            taken.data_state.position,
            lambda shards: {shard: taken.cursors[shard] for shard in shards},
        )
        self.left_out = taken.data_state.left_out

    def write(self, directory: epath.PathLike, taken: HostState) -> None:
        """Writes what `to_save` returned into `directory`."""
        cursors.write(directory, taken.cursors, taken.data_state.position)
        if topology.this_host() == min(self._placements(self.course)):
            state.write(directory, taken.data_state)

    def load(self, directory: epath.PathLike) -> None:
        """Moves to the data state in `directory`, saved by any number of hosts.

        Raises:
          DataError: if it cannot be read, or is of another pipeline.
        """
        saved = state.read(directory)
        state.check_same_pipeline(saved, self.course.data.engine, self._identity)

        def read(shards: Sequence[int]) -> cursors.Cursors:
            return cursors.read(directory, shards, saved.position)

        self._move(self.course.restored(saved), saved.position, read)
        self.left_out = saved.left_out
        # Up to the next batch, cursors of all shards can be read.
        self._loaded_row, self._read = saved.row, read

    def leave_out(self, directory: epath.PathLike | None) -> None:
        """Notes that all rows since the data state in `directory` were left out.

        Without one these are all rows from the beginning.

        The position does not change: the run goes back to the step of that state, and
        continues with the rows that come next.

        Raises:
          DataError: if the state cannot be read, or is of another pipeline, or of a
            later position.
        """
        now = self.get_state().data_state
        saved, before, row = None, (), 0
        if directory is not None:
            saved = state.read(directory)
            state.check_same_pipeline(saved, now.engine, now.pipeline)
            before, row = saved.left_out, saved.row
        if row > now.row:
            raise errors.DataError(
                f"the data state in {directory} is at position {row}, after that of the"
                f" run, {now.row}; load it to continue from there"
            )
        self.left_out = (*before, (row, now.row))
        self.course = self.course.gone_back(saved)

    def took_batch(self) -> None:
        """Counts a training step."""
        self.course = self.course.next()

    def _move(
        self,
        course: stages.Course,
        position: cursors.Position,
        read: elastic_data.ReadCursors,
    ) -> None:
        # If this fails, nothing has changed.
        moved = self._begin(course)
        moved.go_to(position, read)
        self._rows.close()
        self._rows, self.course = moved, course

    def _placements(self, course: stages.Course) -> dict[int, rows.Placement]:
        return delivery.placements(self._sharding, course.size, tuple(course.sizes))

    def _begin(self, course: stages.Course) -> prefetch.Prefetched[elastic_data.Batch]:
        placement = self._placements(course)[topology.this_host()]
        return prefetch.Prefetched(
            course.data.host_batches(placement),
            make=functools.partial(
                _placed, sharding=self._sharding, placement=placement
            ),
            read_ahead=self._read_ahead,
            at_most=course.batches_left,
        )


# The types to which JAX converts integers without jax_enable_x64.
_NARROWED = {np.dtype("int64"): "int32", np.dtype("uint64"): "uint32"}


def _placed(
    loaded: dict[str, np.ndarray],
    *,
    sharding: NamedSharding,
    placement: rows.Placement,
) -> elastic_data.Batch:
    """Puts a host's rows on its devices, in the same way for every batch."""
    num_rows, held = placement.global_batch_size, placement.held

    def part(feature: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(num_rows)
        # The rows of a device are consecutive among those of its host.
        first = int(np.searchsorted(held, start))
        return feature[first : first + stop - start, *index[1:]]

    for name, feature in loaded.items():
        _check_fits(name, feature)
        if len(feature) != len(held):
            raise errors.DataError(
                f"this host loads {len(held)} of the {num_rows} rows of a batch,"
                f" but its iterator yielded {len(feature)}"
            )
    shapes = {name: (num_rows, *f.shape[1:]) for name, f in loaded.items()}
    return {
        name: jax.make_array_from_callback(
            shapes[name],
            delivery.feature_sharding(sharding, name, shapes[name]),
            functools.partial(part, feature),
        )
        for name, feature in loaded.items()
    }


def _check_fits(name: str, feature: np.ndarray) -> None:
    if feature.dtype.kind in "OSU":
        raise errors.DataError(
            f"feature {name!r} has values such as {next(feature.flat, None)!r:.40}, and"
            " JAX arrays hold numbers alone; leave it out in make_shard, or convert it"
            " to numbers (ec.data.LocalBatches delivers bytes and text as they are)"
        )
    # Without jax_enable_x64 JAX would keep only the low half of a large number.
    dtype = _NARROWED.get(feature.dtype)
    wide = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]
    if dtype is None or wide or not feature.size:
        return
    limits = np.iinfo(dtype)
    for value in (feature.min(), feature.max()):
        if not limits.min <= value <= limits.max:
            raise errors.DataError(
                f"feature {name!r} has the value {value}, but JAX would convert it to"
                f" {dtype}; make it smaller, or set jax_enable_x64"
            )


@dataclasses.dataclass(frozen=True)
class LeavingOut:
    """A component that is loaded in place of the data, whose position does not change.

    Attributes:
      leave_out: receives the directory of the data state of a step, or None for the
        beginning, and notes that all rows since then are left out; see
        `HostIterator.leave_out`.
    """

    leave_out: Callable[[epath.Path | None], object]

    async def save(self, directory: Any) -> Awaitable[None]:
        """Is not called: the data itself is saved."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Notes the rows."""
        await asyncio.to_thread(self.leave_out, directory)
        return done()


def done() -> Awaitable[None]:
    """What Orbax may wait for after a load that is complete."""
    nothing = asyncio.get_running_loop().create_future()
    nothing.set_result(None)
    return nothing


class Batches:
    """The iterator in the training process.

    Args:
      data: the data.
      mesh: the training mesh.
      spec: the axes over which a batch is sharded; see `ec.batches`.
      global_batch_size: rows of a global batch, B.
      read_ahead: how far each host reads ahead of the loop, or a number of batches.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        mesh: Mesh,
        spec: PartitionSpec | None = None,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead | int = prefetch.TWO_BATCHES,
    ) -> None:
        elastic_data.check(data, caller="Batches")
        read_ahead = prefetch.ReadAhead.of(read_ahead)
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
            global_batch_size=self._host.course.size,
            warn_after_secs=read_ahead.warn_after_secs,
        )
        self._is_closed = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> elastic_data.Batch:
        if self._is_closed:
            raise errors.DataError("this iterator was closed; make a new one")
        course = self._host.course.due()
        if course is not self._host.course:
            self._go_on(course)
        batch = self._deliver(self._host)
        self._host.took_batch()
        return batch

    def begin_at(self, step: int) -> None:
        """Says of which training step the next batch is, in a run of stages.

        The iterator counts steps by itself. It has to be told after it has loaded a
        state of a run that had no stages yet.

        Raises:
          DataError: if a stage that is new would have begun before that step.
        """
        self._host.course = self._host.course.at_step(step)

    def reset(self) -> None:
        """Moves to the beginning of the data."""
        self._host.reset()
        self._deliver.resize(self._host.course.size)

    def resize(self, global_batch_size: int) -> None:
        """Continues with batches of another size.

        Every process calls it after the same batch. No logical shard moves to another
        host: it is sufficient that the number of hosts divides that of shards, and both
        sizes.

        Args:
          global_batch_size: rows of a global batch from now on, or until a stage of the
            data begins that has a size.

        Raises:
          ConfigError: if the batch does not divide over the mesh, if logical shards
            would move, or if processes give different sizes or call it after different
            batches.
          RunError: if another process did not call it. Nothing has changed on any host
            after an error.
        """
        course = self._host.course.resized(global_batch_size)
        num_taken = self._host.get_state().data_state.row
        check_alike(self._sharding, course, f"row {num_taken}")
        self._go_on(course)

    def _go_on(self, course: stages.Course) -> None:
        self._host.go_on(course)
        self._deliver.resize(course.size)

    async def save(self, directory: AwaitedDirectory) -> Awaitable[None]:
        """Captures the state; the awaitable writes it into Orbax's directory."""
        began = time.monotonic()
        with metrics.DATA_SAVE_BLOCK.timed():
            taken = self._host.to_save(self._host.get_state())

        async def write() -> None:
            path = await directory.await_creation()
            await asyncio.to_thread(self._host.write, path, taken)
            metrics.DATA_SAVE.record(time.monotonic() - began)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Moves to the state saved in `directory`, by any number of hosts.

        It has moved when the awaitable is returned: otherwise Orbax would wrap an error
        in one about an incompatible handler.
        """
        with metrics.DATA_LOAD.timed():
            await asyncio.to_thread(self._host.load, directory)
        self._deliver.resize(self._host.course.size)
        return done()

    @property
    def left_out(self) -> state.Ranges:
        """The ranges of rows that were skipped, each `(first row, row after it)`."""
        return self._host.left_out

    def leaving_out(self) -> LeavingOut:
        """What to load in place of this iterator to skip data, as after a loss spike.

        The model goes back to an earlier step, and the iterator stays where it is: it
        records that the rows since that step are left out, and the run continues with
        the rows that come next.
        """
        return LeavingOut(self._host.leave_out)

    def close(self) -> None:
        """Stops reading ahead, and yields no more batches; they can still be saved."""
        self._is_closed = True
        self._host.close()
