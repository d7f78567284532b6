"""Iterates over the data on each accelerator host.

The head calls `HostData` like any role of a host; batches are returned as arrays.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import colocated_python
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import calls, errors
from elastic_ckpt.data import (
    compatibility,
    cursors,
    elastic_data,
    iterator,
    prefetch,
    state,
)
from elastic_ckpt_sidecar import failures, host_calls, messages

# Batches that the head takes from its workers before the loop requests them.
HEAD_AHEAD = 1
# The number of states that a host keeps, including one whose batch may not have reached
# the head.
STATES = HEAD_AHEAD + 2

# Shorter waits are not reported to the head.
_SHORT_SECS = 0.001

# Maximum number of states kept until they are written.
_SAVES_AT_ONCE = 8


@failures.reported()
def facts(call: jax.Array) -> jax.Array:
    """The facts of each host, without its pipeline."""
    return messages.encode(compatibility.local_facts(), _rows_of(call))


class HostData:
    """One host's data, with methods that the head calls.

    The head fetches batches ahead of the loop, so the host keeps its most recent states
    by number. The number increases by one with each batch. At each load or change, the
    head assigns a number that no host has used.
    """

    def __init__(self, rows: iterator.HostIterator) -> None:
        self._rows = rows
        self._taken: dict[int, Callable[[str], None]] = {}
        self._begin(0)

    def role(self, name: str) -> HostData:
        """See `calls.Host`."""
        assert name == HostData.__name__
        return self

    def next(self) -> elastic_data.Batch:
        """The next batch for the head."""
        batch = self._rows.next()
        # Keeps earlier states too, because the loop may not have taken this batch yet.
        self._states.append((self._states[-1][0] + 1, self._rows.get_state()))
        return batch

    @calls.call()
    def take(
        self,
        ticket: int,
        number: int,
        progress: state.Progress | None,
        left_out: state.Ranges,
    ) -> None:
        """Keeps the state `number` for a save, under a ticket."""
        self._taken[ticket] = self._rows.take(
            self._state(number), progress=progress, left_out=left_out
        )
        # Drops the state of an abandoned save, which is never requested.
        self._taken.pop(ticket - _SAVES_AT_ONCE, None)

    @calls.call(limit_secs=calls.LONG_SECS)
    def write(self, ticket: int, directory: str) -> None:
        """Writes the state kept under a ticket into a directory."""
        self._taken.pop(ticket)(directory)

    @calls.call(limit_secs=calls.LONG_SECS)
    def load(self, begin: int, directory: str) -> None:
        """Moves to the state in a directory, which gets the number `begin`."""
        self._rows.load(directory, state.read(directory))
        self._begin(begin)

    @calls.call()
    def num_rows(self, number: int) -> int:
        """The number of rows before the state `number`."""
        return state.row_of(self._state(number)[0])

    @calls.call()
    def reset(self, begin: int) -> None:
        """Moves to the beginning, which gets the number `begin`."""
        self._rows.reset()
        self._begin(begin)

    @calls.call()
    def rewind(self, number: int) -> None:
        """Moves back to the state `number`, unless this host is still there."""
        taken = self._state(number)
        if self._states[-1][0] != number:
            self._rows.set_state(taken)
        while self._states[-1][0] != number:
            self._states.pop()

    @calls.call()
    def continue_with(
        self,
        begin: int,
        number: int,
        progress: state.Progress | None,
        size: int | None,
    ) -> None:
        """Continues from the state `number` with a new batch size or stage.

        Args:
          begin: the number of the new state.
          number: the number of the old state.
          progress: the run's progress.
          size: the number of rows in a batch; None begins the next stage.
        """
        self.rewind(number)
        course = self._rows.course.with_progress(progress)
        self._rows.continue_with(course.due() if size is None else course.resized(size))
        self._begin(begin)

    @calls.call()
    def close(self) -> None:
        """Stops reading ahead."""
        self._rows.close()

    def _begin(self, number: int) -> None:
        self._states = collections.deque(
            [(number, self._rows.get_state())], maxlen=STATES
        )

    def _state(self, number: int) -> cursors.HostState:
        for each, taken in self._states:
            if each == number:
                return taken
        raise errors.DataError(
            "the hosts are no longer at the same batch, because a load or a change"
            " failed on some of them; load a saved state again"
        )


class _HostWorker(host_calls.HostCalls):
    """The data of this process's host.

    Args:
      data: the data to iterate over.
      spec: the sharding of a batch over the mesh of the calls.
      global_batch_size: the number of rows in a global batch.
      read_ahead: how far to read ahead of the head.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        spec: PartitionSpec,
        global_batch_size: int,
        read_ahead: prefetch.ReadAhead,
    ) -> None:
        # Each process is one host, regardless of its number.
        super().__init__(collections.defaultdict(int))
        self._data = data
        self._spec = spec
        self._global_batch_size = global_batch_size
        self._read_ahead = read_ahead
        self._no_wait: jax.Array | None = None

    @failures.reported()
    def connect(self, call: jax.Array) -> jax.Array:
        """Creates the host; returns its facts, including the pipeline."""
        own = compatibility.local_facts(self._data)
        rows = iterator.HostIterator(
            self._data,
            sharding=NamedSharding(_rows_of(call).mesh, self._spec),
            global_batch_size=self._global_batch_size,
            read_ahead=self._read_ahead,
        )
        self.hosts[0] = HostData(rows)
        return messages.encode(own, _rows_of(call))

    @failures.reported()
    def next(self, call: jax.Array) -> tuple[elastic_data.Batch, jax.Array]:
        """The next global batch, and how long each host waited for the batch.

        Returns:
          The batch, on the mesh of `call`, and the seconds, float32 `[devices]`.
        """
        began = time.monotonic()
        batch = self.hosts[0].next()
        waited_secs = time.monotonic() - began
        if waited_secs > _SHORT_SECS:
            return batch, messages.on_each(call, waited_secs)
        if self._no_wait is None:
            self._no_wait = messages.on_each(call, 0)
        return batch, self._no_wait


def _rows_of(call: jax.Array) -> NamedSharding:
    assert isinstance(call.sharding, NamedSharding)
    return call.sharding


Worker: Any = colocated_python.colocated_python_class(_HostWorker)
Facts: Any = colocated_python.colocated_python(facts)
