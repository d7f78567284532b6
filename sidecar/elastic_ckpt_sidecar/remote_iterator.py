"""The head's handle of the data iterators that run beside the accelerator hosts."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding

from elastic_ckpt.core import background, errors, topology
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

# A batch, and how long the worker of each device that this process can call waited.
_Fetched = tuple[elastic_data.Batch, jax.Array]


class RemoteIterator(iterator.Batches):
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

    def _begin(self, mesh: Mesh, read_ahead: prefetch.ReadAhead) -> Any:
        return _Workers(self._course, mesh, self._sharding, read_ahead)


class _Workers:
    """The workers of all hosts, with the methods of an `iterator.HostIterator`.

    Attributes:
      identity: that of the data.
      calls: fetches batches ahead of the loop, and makes other calls of workers in turn
        with them.
    """

    def __init__(
        self,
        course: stages.Course,
        mesh: Mesh,
        sharding: NamedSharding,
        read_ahead: prefetch.ReadAhead,
    ) -> None:
        self._course = course
        self.identity = course.data.identity()
        self._cpu_sharding = topology.over_all_devices(
            colocated_python.colocated_cpu_devices(mesh)
        )
        self._tickets = itertools.count()
        # Batches that the loop took since the workers began to count.
        self._num_taken = 0
        self._worker = worker.Worker(
            course.data, sharding.spec, course.base_size, read_ahead
        )
        self._check_compatibility(mesh)
        message = messages.encode({}, self._cpu_sharding)
        self.calls = background.BackgroundCalls(
            functools.partial(_fetch, self._worker, message, sharding),
            depth=worker.HEAD_AHEAD,
        )
        # This also runs if `close` is never called.
        release = functools.partial(_release, self._worker, self.calls)
        background.close_with(self, release)

    def next(self) -> elastic_data.Batch:
        batch, self._waited_secs = self.calls.take()
        self._num_taken += 1
        return batch

    def num_ready(self) -> int:
        return self.calls.num_ready()

    def explain(self) -> str:
        secs = {
            shard.device.process_index: float(np.asarray(shard.data)[0])
            for shard in self._waited_secs.addressable_shards
        }
        slowest = max(secs, key=lambda host: secs[host])
        others = max(
            (spent for host, spent in secs.items() if host != slowest), default=0
        )
        return (
            f"host {slowest} had to wait {secs[slowest]:.1f} s for its rows, the others"
            f" at most {others:.1f} s"
        )

    def reset(self) -> None:
        self._move(self._worker.reset)
        self._course = stages.Course.first(self._course.data, self._course.base_size)

    def go_on(self, course: stages.Course) -> None:
        self._move(
            self._worker.go_on,
            global_batch_size=course.size,
            begins_stage=course.stage != self._course.stage,
            progress=_as_json(course.progress),
            batches=self._num_taken,
        )
        self._course = course

    def _move(self, method: Any, **content: Any) -> None:
        try:
            self._submit(method, **content).result(_ANSWER_SECS)
        except TimeoutError:
            raise errors.DataError(
                f"the workers have not answered for {_ANSWER_SECS:g} s: a read of the"
                " data may hang; see to the storage, and continue from the checkpoint"
            ) from None
        finally:
            # Workers that have not answered do it later, before the next batch.
            self._discard()

    def take(
        self, *, progress: state.Progress | None, left_out: state.Ranges
    ) -> Callable[[epath.Path], None]:
        ticket = next(self._tickets)
        # Not waited for: a batch may be on its way.
        taken = self._submit(
            self._worker.take_state,
            ticket=ticket,
            batches=self._num_taken,
            progress=_as_json(progress),
            left_out=left_out,
        )

        def write(directory: epath.Path) -> None:
            taken.result()
            write_state = functools.partial(
                self._call,
                self._worker.write_state,
                ticket=ticket,
                directory=str(directory),
            )
            pauses = messages.pauses()
            while not all(write_state()):
                next(pauses)

        return write

    def load(self, directory: epath.Path, saved: state.DataState) -> None:
        self._submit(self._worker.load_state, directory=str(directory)).result()
        self._discard()
        self._course = self._course.restored(saved)

    def num_rows(self) -> int:
        each = self._submit(self._worker.num_rows, batches=self._num_taken).result()
        return json.loads(each[0].tobytes())

    def close(self) -> None:
        """Workers that do not answer are left alone after a while."""
        self.calls.close(lambda: self._call(self._worker.close))
        _release(self._worker, self.calls, wait=True)

    def _discard(self) -> None:
        # Forgets what was fetched: the workers have gone elsewhere.
        self.calls.drop()
        self._num_taken = 0

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

    def _submit(self, method: Any, **content: Any) -> Any:
        return self.calls.submit(functools.partial(self._call, method, **content))

    def _call(self, method: Any, **content: Any) -> np.ndarray:
        with failures.reaching_the_head():
            return messages.rows(method(messages.encode(content, self._cpu_sharding)))


def _fetch(workers: Any, message: jax.Array, sharding: NamedSharding) -> _Fetched:
    with failures.reaching_the_head():
        batch, waited_secs = jax.block_until_ready(workers.next(message))
    placed = {
        name: topology.place(
            feature, delivery.feature_sharding(sharding, name, feature.shape)
        )
        for name, feature in batch.items()
    }
    return placed, waited_secs


def _as_json(progress: state.Progress | None) -> dict[str, int | None] | None:
    """The progress of a run as JSON."""
    return None if progress is None else dict(vars(progress))


def _release(
    workers: Any, calls: background.BackgroundCalls[_Fetched], *, wait: bool
) -> None:
    calls.close(wait=wait)
    messages.release(workers)
