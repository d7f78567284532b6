"""The head's handle of the data iterators that run beside the accelerator hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Awaitable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import background, errors, metrics, topology
from elastic_ckpt.data import (
    compatibility,
    delivery,
    elastic_data,
    iterator,
    prefetch,
    stages,
    state,
)
from elastic_ckpt_sidecar import failures, messages, worker

# How long a worker may take to go to the beginning, or to another batch size.
_ANSWER_SECS = 60.0


class RemoteIterator:
    """Global batches from workers in colocated Python; they write their own state.

    To a training loop it is an iterator, to Orbax v1 a `StatefulCheckpointable`: the
    state goes from the worker's host into the step's temporary directory, before Orbax
    commits the step, and never passes through the head.

    Workers have the next batches ready on their hosts' CPU devices. A thread of the
    head takes the next one from there to the accelerators while a step runs, so a batch
    is requested, transferred and checked before the loop needs it.

    Args:
      data: what to iterate over.
      mesh: the training mesh.
      spec: how a batch is sharded over it; see `ec.batches`.
      global_batch_size: rows of a global batch, B.
      read_ahead: how far each worker reads ahead of the head.

    Raises:
      ConfigError: if hosts differ in facts that have to be equal; it names them for
        each host.
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
        self._course = stages.Course.first(data, global_batch_size)
        self._sharding = topology.batch_sharding(mesh, spec)
        self._cpu_sharding = topology.over_all_devices(
            colocated_python.colocated_cpu_devices(mesh)
        )
        self._deliver = delivery.Delivery(
            data,
            sharding=self._sharding,
            global_batch_size=self._course.size,
            warn_after_secs=read_ahead.warn_after_secs,
        )
        self._tickets = itertools.count()
        self._worker = worker.Worker(
            data, self._sharding.spec, global_batch_size, read_ahead
        )
        self._check_compatibility(mesh)
        self._workers = _Workers(
            self._worker,
            messages.encode({}, self._cpu_sharding),
            self._sharding,
        )
        # This also runs if `close` is never called.
        release = functools.partial(_release, self._worker, self._workers.calls)
        background.close_with(self, release)

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> elastic_data.Batch:
        self._begin_stage()
        batch = self._deliver(self._workers)
        self._course = self._course.next()
        return batch

    def begin_at(self, step: int) -> None:
        """See `iterator.Batches.begin_at`."""
        self._course = self._course.at_step(step)

    def _begin_stage(self) -> None:
        course = self._course.due()
        if course is not self._course:
            self._change(course)

    def _go_on(self, course: stages.Course) -> None:
        self._course = course
        self._deliver.resize(course.size)

    def reset(self) -> None:
        """Moves the workers to the beginning."""
        try:
            self._in_turn(self._worker.reset, within_secs=_ANSWER_SECS)
        finally:
            # Workers that have not answered do it later, before the next batch.
            self._begin_anew()
        self._go_on(stages.Course.first(self._course.data, self._course.base_size))

    def resize(self, global_batch_size: int) -> None:
        """Continues the workers with batches of another size.

        See `iterator.Batches.resize`.
        """
        course = self._course.resized(global_batch_size)
        after = f"batch {self._workers.num_taken} since its last change"
        iterator.check_alike(self._sharding, course, after)
        self._change(course)

    def _change(self, course: stages.Course) -> None:
        try:
            self._in_turn(
                self._worker.go_on,
                within_secs=_ANSWER_SECS,
                global_batch_size=course.size,
                begins_stage=course.stage != self._course.stage,
                progress=_as_json(course.progress),
                batches=self._workers.num_taken,
            )
        finally:
            self._begin_anew()
        self._go_on(course)

    async def save(self, directory: iterator.AwaitedDirectory) -> Awaitable[None]:
        """Has the workers keep their state now, and write it in the background."""
        ticket = next(self._tickets)
        began = time.monotonic()
        with metrics.DATA_SAVE_BLOCK.timed():
            # Not waited for: a batch may be on its way.
            taken = self._submit(
                self._worker.take_state,
                ticket=ticket,
                batches=self._workers.num_taken,
                progress=_as_json(self._course.progress),
            )

        async def write() -> None:
            path = await directory.await_creation()
            await asyncio.to_thread(taken.result)
            await asyncio.to_thread(self._write, ticket, path)
            metrics.DATA_SAVE.record(time.monotonic() - began)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Has the workers go to the state in `directory`, on any number of hosts.

        That is done at once: an error of the awaitable would reach the caller of Orbax
        as one of an incompatible handler.
        """
        with metrics.DATA_LOAD.timed():
            await asyncio.to_thread(
                self._in_turn, self._worker.load_state, directory=str(directory)
            )
        self._begin_anew()
        if self._course.progress is not None:
            saved = await asyncio.to_thread(state.read, directory)
            self._go_on(self._course.restored(saved))
        return iterator.done()

    @property
    def left_out(self) -> state.Ranges:
        """The rows that were left out; see `DataState`."""
        rows = self._workers.calls.submit(
            functools.partial(self._call, self._worker.left_out)
        ).result()
        ranges = json.loads(rows[0].tobytes())
        return tuple((start, stop) for start, stop in ranges)

    def leaving_out(self) -> iterator.LeavingOut:
        """See `iterator.Batches.leaving_out`."""

        def leave_out(directory: epath.Path | None) -> None:
            self._in_turn(
                self._worker.leave_out,
                directory="" if directory is None else str(directory),
                batches=self._workers.num_taken,
            )
            self._begin_anew()
            if self._course.progress is not None:
                to = None if directory is None else state.read(directory)
                self._course = self._course.gone_back(to)

        return iterator.LeavingOut(leave_out)

    def close(self) -> None:
        """Releases the workers; the iterator cannot be used any more.

        Workers that do not answer are left alone after a while.
        """
        self._workers.calls.close(lambda: self._call(self._worker.close))
        _release(self._worker, self._workers.calls, wait=True)

    def _begin_anew(self) -> None:
        self._workers.discard()
        self._deliver.resize(self._course.size)

    def _write(self, ticket: int, directory: epath.Path) -> None:
        self._call(self._worker.write_state, ticket=ticket, directory=str(directory))
        pauses = messages.pauses()
        while not all(self._call(self._worker.is_written, ticket=ticket)):
            next(pauses)

    def _check_compatibility(self, mesh: Mesh) -> None:
        head = [compatibility.local_facts(self._course.data, role="the head")]
        message = messages.encode({}, self._cpu_sharding)
        # First the facts that need no user code, which may fail to arrive.
        for ask in (worker.Facts, self._worker.facts):
            try:
                with failures.reaching_the_head():
                    facts = messages.decode_rows(ask(message))
            except errors.ElasticCkptError:
                raise
            except Exception as error:
                raise errors.ConfigError(
                    "the workers beside the accelerators cannot run our code, or yours:"
                    f" {error}; build their image by docs/pages/guides/pathways.md,"
                    " with the modules that your pipeline imports"
                ) from error
            compatibility.check(head + facts)
        compatibility.check_controllers(self._course.data, mesh)

    def _in_turn(
        self, method: Any, *, within_secs: float | None = None, **content: Any
    ) -> np.ndarray:
        # After the batches that are on their way.
        try:
            return self._submit(method, **content).result(within_secs)
        except TimeoutError:
            raise errors.DataError(
                f"the workers have not answered for {within_secs:g} s: a read of the"
                " data may hang; see to the storage, and continue from the checkpoint"
            ) from None

    def _submit(self, method: Any, **content: Any) -> Any:
        return self._workers.calls.submit(
            functools.partial(self._call, method, **content)
        )

    def _call(self, method: Any, **content: Any) -> np.ndarray:
        with failures.reaching_the_head():
            return messages.rows(method(messages.encode(content, self._cpu_sharding)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fetched:
    batch: elastic_data.Batch
    # One for each device whose worker this process can call.
    waited_secs: jax.Array


class _Workers:
    """Batches of the workers, fetched ahead of the loop.

    Attributes:
      calls: fetches, and other calls of workers in turn with them.
      num_taken: batches that the loop took since the workers began to count.
    """

    def __init__(
        self, workers: Any, message: jax.Array, sharding: NamedSharding
    ) -> None:
        self.calls = background.BackgroundCalls(
            functools.partial(_fetch, workers, message, sharding),
            depth=worker.HEAD_AHEAD,
        )
        self.num_taken = 0

    def next(self) -> elastic_data.Batch:
        fetched = self.calls.take()
        self.num_taken += 1
        self._waited_secs = fetched.waited_secs
        return fetched.batch

    def num_ready(self) -> int:
        return self.calls.num_ready()

    def explain(self, waited_secs: float) -> str:
        secs = {
            shard.device.process_index: float(np.asarray(shard.data)[0])
            for shard in self._waited_secs.addressable_shards
        }
        slowest = max(secs, key=lambda host: secs[host])
        others = max(
            (spent for host, spent in secs.items() if host != slowest), default=0
        )
        return (
            f"waited {waited_secs:.1f} s for a batch: host {slowest} had to wait"
            f" {secs[slowest]:.1f} s for its rows, the others at most {others:.1f} s"
        )

    def discard(self) -> None:
        """Forgets what was fetched: the workers have gone elsewhere."""
        self.calls.drop()
        self.num_taken = 0


def _fetch(workers: Any, message: jax.Array, sharding: NamedSharding) -> _Fetched:
    with failures.reaching_the_head():
        batch, waited_secs = jax.block_until_ready(workers.next(message))
    placed = {
        name: topology.place(
            feature, delivery.feature_sharding(sharding, name, feature.shape)
        )
        for name, feature in batch.items()
    }
    return _Fetched(batch=placed, waited_secs=waited_secs)


def _as_json(progress: state.Progress | None) -> dict[str, int | None] | None:
    """The progress of a run as JSON."""
    return None if progress is None else dict(vars(progress))


def _release(
    workers: Any, calls: background.BackgroundCalls[_Fetched], *, wait: bool
) -> None:
    calls.close(wait=wait)
    messages.release(workers)
