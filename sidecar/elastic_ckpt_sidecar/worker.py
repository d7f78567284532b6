"""The worker: one object on each accelerator host that iterates over the data.

Calls of a host may be carried out one after the other, so none of them waits for
storage, but for `load_state`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
from jax.experimental import colocated_python
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.data import compatibility, elastic_data, iterator, prefetch, state
from elastic_ckpt_sidecar import failures, messages

# Batches that the head takes from its workers before the loop asks for them.
HEAD_AHEAD = 1

# Shorter waits are not reported to the head.
_SHORT_SECS = 0.001

# States that are kept until they are written.
_SAVES_AT_ONCE = 8


@failures.reported()
def facts(call: jax.Array) -> jax.Array:
    """The facts of each host, but for its pipeline."""
    return messages.encode(compatibility.local_facts(), _rows_of(call))


class _HostWorker:
    """Iterates on one host; made there, at the first call that reaches it.

    Args:
      data: what to iterate over.
      spec: how a batch is sharded over the mesh of the calls.
      global_batch_size: rows of a global batch.
      read_ahead: how far to be ahead of the head.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        spec: PartitionSpec,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead,
    ) -> None:
        self._data = data
        self._spec = spec
        self._global_batch_size = global_batch_size
        self._read_ahead = read_ahead
        self._iterator: iterator.HostIterator | None = None
        self._taken: dict[int, Callable[[str], None]] = {}
        self._writes: dict[int, futures.Future[None]] = {}
        self._writer = futures.ThreadPoolExecutor(max_workers=1)
        self._no_wait: jax.Array | None = None

    @failures.reported()
    def facts(self, call: jax.Array) -> jax.Array:
        """The facts of each host with those of its pipeline."""
        return messages.encode(compatibility.local_facts(self._data), _rows_of(call))

    @failures.reported()
    def next(self, call: jax.Array) -> tuple[elastic_data.Batch, jax.Array]:
        """The next global batch, and how long each host waited for it.

        Returns:
          The batch on the mesh of `call`, and seconds, float32 `[devices]`.
        """
        host = self._on(call)
        began = time.monotonic()
        batch = host.next()
        waited_secs = time.monotonic() - began
        # The head may not have given the newest to the loop yet.
        self._states.append((self._states[-1][0] + 1, host.get_state()))
        if waited_secs > _SHORT_SECS:
            return batch, messages.on_each(call, waited_secs)
        if self._no_wait is None:
            self._no_wait = messages.on_each(call, 0)
        return batch, self._no_wait

    @failures.reported()
    def take_state(self, call: jax.Array) -> jax.Array:
        """Keeps the state after so many batches, under the ticket that `call` names."""
        content = messages.decode(call)
        host = self._on(call)
        ticket = content["ticket"]
        self._taken[ticket] = host.take(
            dict(self._states)[content["batches"]],
            progress=_progress(content["progress"]),
            left_out=content["left_out"],
        )
        # The state of an abandoned save is never requested.
        self._taken.pop(ticket - _SAVES_AT_ONCE, None)
        return call

    @failures.reported()
    def write_state(self, call: jax.Array) -> jax.Array:
        """Writes the state kept under a ticket into a directory, in the background.

        It is called until it is written on all hosts: float32 `[devices]`, 1 or 0.
        Raises what the writing raised.
        """
        content = messages.decode(call)
        ticket = content["ticket"]
        if ticket in self._taken:
            self._writes[ticket] = self._writer.submit(
                self._taken.pop(ticket), content["directory"]
            )
            self._writes.pop(ticket - _SAVES_AT_ONCE, None)
        is_written = self._writes[ticket].done()
        if is_written:
            self._writes[ticket].result()
        return messages.on_each(call, is_written)

    @failures.reported()
    def load_state(self, call: jax.Array) -> jax.Array:
        """Goes to the state in a directory."""
        directory = messages.decode(call)["directory"]
        self._on(call).load(directory, state.read(directory))
        self._begin_to_count()
        return call

    @failures.reported()
    def num_rows(self, call: jax.Array) -> jax.Array:
        """The number of rows in so many batches, and in those before, as JSON."""
        self._on(call)
        position, _ = dict(self._states)[messages.decode(call)["batches"]]
        return messages.encode(state.row_of(position), _rows_of(call))

    @failures.reported()
    def reset(self, call: jax.Array) -> jax.Array:
        """Goes to the beginning."""
        self._on(call).reset()
        self._begin_to_count()
        return call

    @failures.reported()
    def go_on(self, call: jax.Array) -> jax.Array:
        """Changes the size or the stage, after so many batches of the former."""
        content = messages.decode(call)
        host = self._on(call)
        course = host.course.with_progress(_progress(content["progress"]))
        if content["begins_stage"]:
            course = course.due()
        else:
            course = course.resized(content["global_batch_size"])
        # The head drops the batches after those that the loop took.
        if content["batches"] < self._states[-1][0]:
            host.set_state(dict(self._states)[content["batches"]])
        try:
            host.go_on(course)
        finally:
            self._begin_to_count()
        return call

    @failures.reported()
    def close(self, call: jax.Array) -> jax.Array:
        """Ends what reads ahead."""
        self._on(call).close()
        return call

    def _begin_to_count(self) -> None:
        assert self._iterator is not None
        # The newest states, by the number of batches from here on.
        self._states: collections.deque[tuple[int, iterator.HostState]]
        now = (0, self._iterator.get_state())
        self._states = collections.deque([now], maxlen=HEAD_AHEAD + 2)

    def _on(self, call: jax.Array) -> iterator.HostIterator:
        if self._iterator is None:
            self._iterator = iterator.HostIterator(
                self._data,
                sharding=NamedSharding(_rows_of(call).mesh, self._spec),
                global_batch_size=self._global_batch_size,
                read_ahead=self._read_ahead,
            )
            self._begin_to_count()
        return self._iterator


def _progress(content: dict[str, Any] | None) -> state.Progress | None:
    return None if content is None else state.Progress(**content)


def _rows_of(call: jax.Array) -> NamedSharding:
    assert isinstance(call.sharding, NamedSharding)
    return call.sharding


Worker: Any = colocated_python.colocated_python_class(_HostWorker)
Facts: Any = colocated_python.colocated_python(facts)
