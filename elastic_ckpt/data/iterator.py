"""Global batches as JAX arrays, with a data state that any number of hosts can load.

`HostIterator` runs on each host: it loads the host's rows and places them on the host's
devices. `Batches` drives it in the training process and is a plain iterator and an
Orbax `StatefulCheckpointable`. `RemoteIterator` drives the `HostIterator`s of other
hosts in the same way, through colocated Python.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
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

# How long hosts wait for each other when the batches change, because a slow read may
# delay a host.
CHANGE_SECS = 600.0


def check_alike(sharding: NamedSharding, course: stages.Course, num_taken: int) -> None:
    """Raises a ConfigError unless all processes of a mesh continue in the same way.

    This process continues with `course`, `num_taken` batches after the last change.
    """
    hosts = tuple(delivery.rows_held(sharding, course.size))
    own = f"in batches of {course.size} rows, {num_taken} batches after the last change"
    all_hosts = allgather.shared(hosts).gather("resize", own, timeout_secs=CHANGE_SECS)
    for host, other in zip(hosts, all_hosts, strict=False):
        if other != own:
            raise errors.ConfigError(
                f"host {topology.this_host()} would continue {own}, but host {host}"
                f" would continue {other}; on every host, call resize after the same"
                " batch and with the same arguments"
            )


class HostIterator:
    """Loads one host's rows and assembles global arrays.

    Args:
      data: the data.
      sharding: the sharding of a global batch; see `delivery.feature_sharding`.
      global_batch_size: the number of rows in a global batch, B.
      read_ahead: how far to load batches onto the devices ahead of `next`.

    Attributes:
      course: the current stage, step and batch size.
      identity: the data's `identity`.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        sharding: NamedSharding,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead = prefetch.TWO_BATCHES,
    ) -> None:
        self._sharding, self._read_ahead = sharding, read_ahead
        first = stages.Course.first(data, global_batch_size)
        placements = self._placements(first)
        if topology.this_host() not in placements:
            raise errors.ConfigError(
                f"the mesh has no device of host {topology.this_host()}, so this host"
                " has no rows to load; build the mesh from devices of every host"
            )
        delivery.warn_of_shared_shards(data, placements.values())
        self.identity = data.identity()
        self._start(first)

    def _start(self, course: stages.Course) -> None:
        self.course, self._rows = course, self._begin(course)
        # Where cursors of all shards can be read.
        self._loaded: elastic_data.Place = (self.get_state()[0], dict.fromkeys)

    def reset(self) -> None:
        """Moves to the beginning."""
        self._rows.close()
        self._start(stages.Course.first(self.course.data, self.course.base_size))

    def continue_with(self, course: stages.Course) -> None:
        """Continues with a new batch size or stage.

        Every host of the mesh must call this after the same batch.

        Args:
          course: the new course, at the same step.

        Raises:
          ConfigError: if the batch cannot be split evenly over the mesh, or if a host
            would have to run new logical shards, unless the state was just loaded.
            After an error, nothing has changed.
        """
        position, held = self.get_state()
        num_shards, (loaded, read_others) = course.data.num_shards, self._loaded
        if num_shards and position != loaded:
            placements = self._placements(course)
            for host, before in self._placements(self.course).items():
                moving = np.setdiff1d(
                    placements[host].shards(num_shards), before.shards(num_shards)
                )
                if moving.size:
                    raise errors.ConfigError(
                        f"with batches of {course.size} rows, logical shards"
                        f" {moving.tolist()} would move to host {host}, which has not"
                        " run them; save and then resume with this batch size, or"
                        " choose a number of logical shards and batch sizes that are"
                        f" multiples of the number of hosts, {len(placements)}"
                    )

        def read(shards: Sequence[int]) -> cursors.Cursors:
            # The loaded step may be deleted by now: read only the missing cursors.
            own = {shard: held[shard] for shard in shards if shard in held}
            others = [shard for shard in shards if shard not in held]
            return own | dict(read_others(others)) if others else own

        self._move(course, (position, read))

    def close(self) -> None:
        """Stops reading ahead."""
        self._rows.close()

    def next(self) -> elastic_data.Batch:
        """The next global batch: arrays of shape `[B, ...]` in the given sharding."""
        return next(self._rows)

    def num_ready(self) -> int:
        """The number of batches that are already on the devices."""
        return self._rows.num_ready()

    def explain(self) -> str:
        """The reason for the last wait, with the host name."""
        return f"{compatibility.host_name()} did not have its rows ready"

    def num_rows(self) -> int:
        """The number of rows in all batches so far."""
        return state.row_of(self.get_state()[0])

    def get_state(self) -> cursors.HostState:
        """The state after the last batch."""
        return self._rows.get_state()

    def set_state(self, taken: cursors.HostState) -> None:
        """Rolls back to a state taken since the last load, resize or new stage."""
        position, held = taken
        self._move(self.course, (position, functools.partial(cursors.chosen, held)))

    def take(
        self,
        taken: cursors.HostState | None = None,
        *,
        progress: state.Progress | None,
        left_out: state.Ranges,
    ) -> Callable[[epath.PathLike], None]:
        """Returns a function that writes this host's part of a state into a directory.

        Each cursor is written by one host. By default, the state is the one after the
        last batch.
        """
        position, run = taken or self.get_state()
        data, me = self.course.data, topology.this_host()
        saves = delivery.saved_shards(self._sharding, self.course.size, data.num_shards)
        own = {s: each for s, each in run.items() if saves[s] == me}
        saved = state.DataState(
            engine=data.engine,
            position=position,
            pipeline=self.identity,
            left_out=left_out,
            progress=progress,
        )
        is_first = me == min(self._placements(self.course))

        def write(directory: epath.PathLike) -> None:
            cursors.write(directory, own, position)
            if is_first:
                state.write(directory, saved)

        return write

    def load(self, directory: epath.PathLike, saved: state.DataState) -> None:
        """Moves to the data state that any number of hosts saved in `directory`.

        Raises:
          DataError: if the cursors cannot be read.
        """
        read = functools.partial(cursors.read, directory, position=saved.position)
        place = saved.position, read
        self._move(self.course.restored(saved), place)
        self._loaded = place
        # Starts reading batches while the restore continues.
        self._rows.begin()

    def _move(self, course: stages.Course, place: elastic_data.Place) -> None:
        # Opens the new rows first, so that nothing changes if this fails.
        moved = self._begin(course)
        moved.go_to(*place)
        self._rows.close()
        self._rows, self.course = moved, course

    def _placements(self, course: stages.Course) -> dict[int, rows.Placement]:
        return delivery.placements(self._sharding, course.size, tuple(course.sizes))

    def _begin(self, course: stages.Course) -> prefetch.Prefetched[elastic_data.Batch]:
        placement = self._placements(course)[topology.this_host()]
        return prefetch.Prefetched(
            course.data.host_batches(placement),
            make=functools.partial(
                delivery.placed, sharding=self._sharding, placement=placement
            ),
            read_ahead=self._read_ahead,
        )


@dataclasses.dataclass(frozen=True)
class LeavingOut:
    """An object to load in place of the data, which then stays at its position.

    Attributes:
      leave_out: the function that records that all rows since a step are skipped. It
        receives the directory of the step's data state, or None for the beginning.
    """

    leave_out: Callable[[epath.Path | None], object]

    async def save(self, directory: Any) -> Awaitable[None]:
        """Never called: saves contain the data itself."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Records that the rows since the step are skipped."""
        await asyncio.to_thread(self.leave_out, directory)
        return asyncio.sleep(0)


class Batches:
    """The iterator in the training process; `ec.batches` creates it.

    Finite data ends at the same batch on every host. This requires a computation on all
    devices, so all hosts must call the iterator in the same order.

    Args:
      data: the data.
      mesh: the training mesh.
      spec: the axes over which a batch is sharded; see `ec.batches`.
      global_batch_size: the number of rows in a global batch, B.
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
        self._warn_after_secs = read_ahead.warn_after_secs
        self._has_rows = jax.jit(jnp.any, out_shardings=topology.replicated(mesh))
        self._moved(stages.Course.first(data, global_batch_size))
        self._left_out: state.Ranges = ()
        self._hosts = self._begin(mesh, read_ahead)

    def _begin(self, mesh: Mesh, read_ahead: prefetch.ReadAhead) -> HostIterator:
        # Subclasses return an object with the methods of `HostIterator` for all hosts.
        compatibility.check_controllers(self._course.data, mesh)
        return HostIterator(
            self._course.data,
            sharding=self._sharding,
            global_batch_size=self._course.base_size,
            read_ahead=read_ahead,
        )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> elastic_data.Batch:
        course = self._course.due()
        if course is not self._course:
            self._go_on(course)
        metrics.DATA_READ_AHEAD.record(self._hosts.num_ready())
        finite = course.data.end is not elastic_data.End.NEVER
        for _ in range(delivery.batches_of_end(course.data, course.size)):
            began = time.monotonic()
            batch = self._hosts.next()
            waited = time.monotonic() - began
            metrics.DATA_WAIT.record(waited)
            # The first wait is expected.
            if waited > self._warn_after_secs and self._num_taken:
                logging.warning(
                    "waited %.1f s for a batch: %s", waited, self._hosts.explain()
                )
            self._num_taken += 1
            if not finite or bool(self._has_rows(batch[elastic_data.MASK])):
                num_bytes = sum(feature.nbytes for feature in batch.values())
                metrics.DATA_ROWS.record(self._rows_here)
                metrics.DATA_BYTES.record(num_bytes * self._rows_here // course.size)
                self._course = course.next()
                return batch
        raise StopIteration

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps so far in a run with stages.

        The iterator counts steps by itself. Call this only after loading a state that
        was saved without stages.

        Raises:
          DataError: if a new stage would have begun before that step.
        """
        self._course = self._course.at_step(step)

    def reset(self) -> None:
        """Moves to the beginning of the data."""
        self._hosts.reset()
        self._left_out = ()
        self._moved(stages.Course.first(self._course.data, self._course.base_size))

    def resize(self, global_batch_size: int) -> None:
        """Continues with a new batch size.

        Every process must call this after the same batch. Logical shards must stay on
        their hosts, as they do if the number of hosts divides the number of shards and
        both batch sizes.

        Args:
          global_batch_size: the number of rows in a global batch from now on, or until
            a stage of the data sets its own size.

        Raises:
          ConfigError: if the batch cannot be split evenly over the mesh, if logical
            shards would move, or if processes pass different sizes or call `resize`
            after different batches.
          RunError: if another process did not call `resize`. After an error, nothing
            has changed on any host.
        """
        course = self._course.resized(global_batch_size)
        check_alike(self._sharding, course, self._num_taken)
        self._go_on(course)

    def _go_on(self, course: stages.Course) -> None:
        self._hosts.continue_with(course)
        self._moved(course)

    def _moved(self, course: stages.Course) -> None:
        self._course, self._num_taken = course, 0
        held = delivery.rows_held(self._sharding, course.size)
        # A head without rows of its own counts all rows.
        self._rows_here = len(held.get(topology.this_host(), range(course.size)))

    async def save(self, directory: Any) -> Awaitable[None]:
        """Captures the state; the awaitable writes it to Orbax's directory."""
        began = time.monotonic()
        with metrics.DATA_SAVE_BLOCK.timed():
            write = self._hosts.take(
                progress=self._course.progress, left_out=self._left_out
            )

        async def written() -> None:
            await asyncio.to_thread(write, await directory.await_creation())
            metrics.DATA_SAVE.record(time.monotonic() - began)

        return written()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Moves to the state that any number of hosts saved in `directory`.

        The move happens before this method returns the awaitable. Otherwise, Orbax
        would wrap any error in one about an incompatible handler.
        """
        with metrics.DATA_LOAD.timed():
            saved = await asyncio.to_thread(self._saved, directory)
            await asyncio.to_thread(self._hosts.load, directory, saved)
        self._left_out = saved.left_out
        self._moved(self._course.restored(saved))
        # Orbax awaits this after the load, which has already finished.
        return asyncio.sleep(0)

    def _saved(self, directory: epath.Path) -> state.DataState:
        saved, engine = state.read(directory), self._course.data.engine
        state.check_same_pipeline(saved, engine, self._hosts.identity)
        return saved

    @property
    def left_out(self) -> state.Ranges:
        """The ranges of rows that were skipped, each `(first row, row after last)`."""
        return self._left_out

    def leaving_out(self) -> LeavingOut:
        """Returns an object to load in place of this iterator, to skip bad data.

        Use it after a loss spike. The model rolls back to an earlier step, but the
        iterator stays where it is: it records that the rows since that step are
        skipped, and the run continues with the next rows.
        """
        return LeavingOut(self._leave_out)

    def _leave_out(self, directory: epath.Path | None) -> None:
        saved = None if directory is None else self._saved(directory)
        before, row = ((), 0) if saved is None else (saved.left_out, saved.row)
        now = self._hosts.num_rows()
        if row > now:
            raise errors.DataError(
                f"the data state in {directory} is at position {row}, which is after"
                f" the run's current position, {now}, so no rows can be skipped; to"
                " continue from that position, load the state"
            )
        self._left_out = (*before, (row, now))
        self._course = self._course.gone_back(saved)

    def close(self) -> None:
        """Stops reading ahead; the iterator yields no more batches."""
        self._hosts.close()
