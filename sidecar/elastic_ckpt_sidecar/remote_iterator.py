"""The head's handle for the data iterators on the accelerator hosts."""

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

# How long a worker may take to return to the beginning or change the batch size.
_ANSWER_SECS = 60.0


class RemoteIterator(iterator.Batches):
    """Global batches from workers in colocated Python, which write their own state.

    It is an iterator for a training loop and a `StatefulCheckpointable` for Orbax v1:
    workers write the state into the step's temporary directory before Orbax commits
    the step, and the state never passes through the head.

    Workers prepare the next batches on their hosts' CPU devices. While a step runs, a
    thread in the head moves the next batch to the accelerators, so the batch is
    requested, transferred and checked before the loop needs it.

    Args:
      data: the data to iterate over.
      mesh: the training mesh.
      spec: the sharding of a batch over the mesh; see `ec.batches`.
      global_batch_size: the number of rows in a global batch, B.
      read_ahead: how far each worker reads ahead of the head.

    Raises:
      ConfigError: if hosts differ in software or data. The message lists the
        differences.
    """

    def _begin(self, mesh: Mesh, read_ahead: prefetch.ReadAhead) -> Any:
        return _Workers(self._course, mesh, self._sharding, read_ahead)


# A batch, and how long each host waited for the batch, with a row per device.
_Fetched = tuple[elastic_data.Batch, jax.Array]


class _Workers:
    """The data of all hosts, with the methods of an `iterator.HostIterator`.

    Attributes:
      identity: the identity of the data.
      calls: a thread that fetches batches ahead of the loop and runs other calls in
        between.
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
        # The number of the state after the loop's last batch; see `HostData`.
        self._number = 0
        agent = worker.Worker(course.data, sharding.spec, course.base_size, read_ahead)
        self._agent, self._hosts = agent, _Hosts(agent, self._cpus, sharding)
        self._check_compatibility(mesh)
        self.calls = background.BackgroundCalls(
            self._hosts.fetch, depth=worker.HEAD_AHEAD
        )
        # Also runs if `close` is never called.
        release = functools.partial(_release, agent, self.calls)
        background.close_with(self, release)

    def next(self) -> elastic_data.Batch:
        batch, self._waited_secs = self.calls.take()
        self._number += 1
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
            f"host {slowest} waited {secs[slowest]:.1f} s for its rows, the others at"
            f" most {others:.1f} s"
        )

    def reset(self) -> None:
        self._move(HostData.reset, limit_secs=_ANSWER_SECS)
        self._course = stages.Course.first(self._course.data, self._course.base_size)

    def continue_with(self, course: stages.Course) -> None:
        size = course.size if course.stage == self._course.stage else None
        args = self._number, course.progress, size
        self._move(HostData.continue_with, *args, limit_secs=_ANSWER_SECS)
        self._course = course

    def _move(self, method: Any, *args: Any, limit_secs: float | None = None) -> None:
        before, begin = self._number, self._number + worker.STATES
        # Drops fetched batches, which come from the old position.
        self.calls.drop()
        moved = self.calls.submit(
            functools.partial(self._hosts.move, before, begin, method, *args)
        )
        # Hosts that do not answer in time still move, before the next batch.
        self._number = begin
        try:
            moved.result(limit_secs)
        except TimeoutError:
            raise errors.DataError(
                f"the workers did not answer within {limit_secs:g} s, possibly because"
                " a data read hangs; check the storage, and resume from a checkpoint"
            ) from None
        except BaseException:
            self._number = before
            raise

    def take(
        self, *, progress: state.Progress | None, left_out: state.Ranges
    ) -> Callable[[epath.Path], None]:
        ticket, number = next(self._tickets), self._number
        # Does not wait, because a batch may still be in transfer.
        kept = self._submit(HostData.take, ticket, number, progress, left_out)

        def write(directory: epath.Path) -> None:
            kept.result()
            self._hosts.all(HostData.write, ticket, str(directory))

        return write

    def load(self, directory: epath.Path, saved: state.DataState) -> None:
        self._move(HostData.load, str(directory))
        self._course = self._course.restored(saved)

    def num_rows(self) -> int:
        return self._submit(HostData.num_rows, self._number).result()[0]

    def close(self) -> None:
        """Waits at most 10 s for hosts that do not answer."""
        self.calls.close(lambda: self._hosts.all(HostData.close))
        _release(self._agent, self.calls, wait=True)

    def _check_compatibility(self, mesh: Mesh) -> None:
        head = [compatibility.local_facts(self._course.data, role="the head")]
        message = messages.encode({}, self._cpus)
        # Asks first for the facts that do not require user code, because workers may
        # fail to load this code.
        for ask in (worker.Facts, self._agent.connect):
            try:
                with failures.reaching_the_head():
                    facts = messages.decode_rows(ask(message))
            except errors.ElasticCkptError:
                raise
            except Exception as error:
                raise errors.ConfigError(
                    "the workers on the accelerator hosts cannot run elastic_ckpt or"
                    f" your pipeline ({error}); build their image as described in"
                    " docs/pages/guides/kubernetes.md, including all modules that your"
                    " pipeline imports"
                ) from error
            compatibility.check(head + facts)
        compatibility.check_controllers(self._course.data, mesh)

    def _submit(self, method: Any, *args: Any) -> Any:
        return self.calls.submit(functools.partial(self._hosts.all, method, *args))


class _Hosts:
    """Calls the workers; methods other than `all` run in the fetching thread."""

    def __init__(
        self, agent: Any, cpus: NamedSharding, sharding: NamedSharding
    ) -> None:
        self._agent, self._cpus, self._sharding = agent, cpus, sharding
        self._caller = host_calls.Caller(agent)
        self._message = messages.encode({}, cpus)
        # The number of the state after the last batch received, and whether hosts may
        # be past that state.
        self._number, self._is_behind = 0, False

    def all(self, method: Any, *args: Any) -> list[Any]:
        """Calls all hosts that this process can call; returns their answers."""
        call = calls.of(method)
        outcomes = self._caller.outcomes(call, call.bind(*args), self._cpus)
        for outcome in outcomes:
            if "failed" in outcome:
                raise failures.of_host(outcome)
        return [call.decode_answer(each["answer"]) for each in outcomes]

    def move(self, before: int, begin: int, method: Any, *args: Any) -> None:
        """Moves all hosts to a new state, which gets the number `begin`.

        Args:
          before: the number of the state to which all hosts return if one fails.
          begin: a number that no host has used.
          method: a method of `HostData`.
          *args: the method's arguments after `begin`.
        """
        self._number, self._is_behind = before, True
        self.all(method, begin, *args)
        self._number, self._is_behind = begin, False

    def fetch(self) -> _Fetched:
        """The next batch, on the accelerators."""
        if self._is_behind:
            self.all(HostData.rewind, self._number)
        self._is_behind = True
        with failures.reaching_the_head():
            arrived = self._agent.next(self._message)
            batch, waited_secs = jax.block_until_ready(arrived)
        placed = {
            name: topology.place(
                feature, delivery.feature_sharding(self._sharding, name, feature.shape)
            )
            for name, feature in batch.items()
        }
        self._number, self._is_behind = self._number + 1, False
        return placed, waited_secs


def _release(
    workers: Any, calls: background.BackgroundCalls[_Fetched], *, wait: bool
) -> None:
    calls.close(wait=wait)
    messages.release(workers)
