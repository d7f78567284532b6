"""The head's handle of the data iterators that run beside the accelerator hosts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import colocated_python
from jax.sharding import Mesh, NamedSharding

from elastic_ckpt.core import background, calls, errors, topology
from elastic_ckpt.data import (
    compatibility,
    delivery,
    elastic_data,
    iterator,
    prefetch,
    stages,
    state,
)
from elastic_ckpt_sidecar import failures, host_calls, messages, worker
from elastic_ckpt_sidecar.worker import HostData

# How long a worker may take to go to the beginning, or to another batch size.
_ANSWER_SECS = 60.0


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


# A batch, and how long each host waited for it: a row for each of its devices.
_Fetched = tuple[elastic_data.Batch, jax.Array]


class _Workers:
    """The data of all hosts, with the methods of an `iterator.HostIterator`.

    Attributes:
      identity: that of the data.
      calls: fetches batches ahead of the loop, and makes other calls of hosts in turn
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
        self._cpus = topology.over_all_devices(
            colocated_python.colocated_cpu_devices(mesh)
        )
        self._tickets = itertools.count()
        # Batches that the loop took since the hosts began to count.
        self._num_taken = 0
        agent = worker.Worker(course.data, sharding.spec, course.base_size, read_ahead)
        self._agent, self._caller = agent, host_calls.Caller(agent)
        self._check_compatibility(mesh)
        message = messages.encode({}, self._cpus)
        self.calls = background.BackgroundCalls(
            functools.partial(_fetch, agent, message, sharding),
            depth=worker.HEAD_AHEAD,
        )
        # This also runs if `close` is never called.
        release = functools.partial(_release, agent, self.calls)
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
        self._move(HostData.reset)
        self._course = stages.Course.first(self._course.data, self._course.base_size)

    def go_on(self, course: stages.Course) -> None:
        size = course.size if course.stage == self._course.stage else None
        self._move(HostData.go_on, self._num_taken, course.progress, size)
        self._course = course

    def _move(self, method: Any, *args: Any) -> None:
        try:
            self._submit(method, *args).result(_ANSWER_SECS)
        except TimeoutError:
            raise errors.DataError(
                f"the workers have not answered for {_ANSWER_SECS:g} s: a read of the"
                " data may hang; see to the storage, and continue from the checkpoint"
            ) from None
        finally:
            # Hosts that have not answered do it later, before the next batch.
            self._discard()

    def take(
        self, *, progress: state.Progress | None, left_out: state.Ranges
    ) -> Callable[[epath.Path], None]:
        ticket, taken = next(self._tickets), self._num_taken
        # Not waited for: a batch may be on its way.
        kept = self._submit(HostData.take, ticket, taken, progress, left_out)

        def write(directory: epath.Path) -> None:
            kept.result()
            self._all(HostData.write, ticket, str(directory))

        return write

    def load(self, directory: epath.Path, saved: state.DataState) -> None:
        self._submit(HostData.load, str(directory)).result()
        self._discard()
        self._course = self._course.restored(saved)

    def num_rows(self) -> int:
        return self._submit(HostData.num_rows, self._num_taken).result()[0]

    def close(self) -> None:
        """Hosts that do not answer are left alone after a while."""
        self.calls.close(lambda: self._all(HostData.close))
        _release(self._agent, self.calls, wait=True)

    def _discard(self) -> None:
        # Forgets what was fetched: the workers have gone elsewhere.
        self.calls.drop()
        self._num_taken = 0

    def _check_compatibility(self, mesh: Mesh) -> None:
        head = [compatibility.local_facts(self._course.data, role="the head")]
        message = messages.encode({}, self._cpus)
        # First the facts that need no user code, which may fail to arrive.
        for ask in (worker.Facts, self._agent.connect):
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

    def _submit(self, method: Any, *args: Any) -> Any:
        return self.calls.submit(functools.partial(self._all, method, *args))

    def _all(self, method: Any, *args: Any) -> list[Any]:
        # The answers of the hosts that this process can call.
        call = calls.of(method)
        outcomes = self._caller.outcomes(call, call.bind(*args), self._cpus)
        for outcome in outcomes:
            if "failed" in outcome:
                raise failures.of_host(outcome)
        return [call.decode_answer(each["answer"]) for each in outcomes]


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


def _release(
    workers: Any, calls: background.BackgroundCalls[_Fetched], *, wait: bool
) -> None:
    calls.close(wait=wait)
    messages.release(workers)
