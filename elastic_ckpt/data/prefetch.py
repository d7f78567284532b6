"""Reads batches ahead of the loop, without any effect on the saved state.

`Prefetched` reads a host's rows in a background thread and converts them there, for
example to arrays on devices. Each batch is stored with the state after it, so the
current state is always the one after the last batch taken, no matter how many batches
are read ahead.

A thread that builds rows holds the interpreter lock, which the loop needs for its
steps. If the thread is busy for too long, a warning suggests a worker process.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from absl import logging

from elastic_ckpt.core import background, errors
from elastic_ckpt.data import cursors, elastic_data

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
# A converted batch, and the state after it.
_Made = tuple[T, cursors.HostState]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadAhead:
    """How far to read ahead of the loop.

    Attributes:
      batches: the number of batches to read ahead; 0 reads each batch on request.
      warn_after_secs: the wait for a batch after which a warning names the host that
        was late. The wait for the first batch is exempt.
    """

    batches: int = 2
    warn_after_secs: float = 1.0

    @classmethod
    def of(cls, value: ReadAhead | int) -> ReadAhead:
        """Converts a number of batches to a `ReadAhead`, or returns one unchanged.

        Raises:
          ConfigError: if `value` is neither.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise errors.ConfigError(
                f"read_ahead={value!r} is invalid; pass a number of batches, 0 or more,"
                " or an ec.data.ReadAhead(batches=...)"
            )
        return cls(batches=value)


# The default of `LocalBatches`.
IN_CALLER = ReadAhead(batches=0)
# The default of the other iterators.
TWO_BATCHES = ReadAhead()


# The share of time that the thread may be busy, and the CPU time always allowed.
_MOST_SHARE = 0.05
_LEAST_SECS = 1.0


class Prefetched(Generic[T]):
    """A host's rows, read ahead and converted by `make` in a background thread."""

    def __init__(
        self,
        rows: elastic_data.HostBatches,
        *,
        make: Callable[[dict[str, np.ndarray]], T],
        read_ahead: ReadAhead,
    ) -> None:
        self._rows = rows
        self._state = rows.get_state()
        self._next: Callable[[], _Made[T]] = _Source(rows, make).__next__
        self._calls: background.BackgroundCalls[_Made[T]] | None = None
        if read_ahead.batches:
            call = self._next
            if rows.in_process_by_default:
                call = functools.partial(_watched, call, time.monotonic())
            self._calls = background.BackgroundCalls(call, depth=read_ahead.batches)
            self._next = self._calls.take
        self._close = functools.partial(_close, rows, self._calls)
        background.close_with(self, self._close)

    def __next__(self) -> T:
        what, self._state = self._next()
        return what

    def num_ready(self) -> int:
        """The number of batches that can be taken without waiting."""
        return self._calls.num_ready() if self._calls else 0

    def get_state(self) -> cursors.HostState:
        """The state after the last batch taken; see `HostBatches.get_state`."""
        return self._state

    def go_to(self, position: cursors.Position, read: elastic_data.ReadCursors) -> None:
        """See `HostBatches.go_to`; call it only before the first batch."""
        self._rows.go_to(position, read)
        self._state = self._rows.get_state()

    def begin(self) -> None:
        """Starts reading the first batch, unless nothing is read ahead."""
        if self._calls:
            self._calls.begin()

    def close(self) -> None:
        """Ends the iteration; waits at most 10 s for a read that hangs."""
        self._next = background.closed
        self._close(wait=True)


class _Source(Generic[T]):
    """Converts rows; retries rows whose conversion failed."""

    def __init__(
        self,
        rows: elastic_data.HostBatches,
        make: Callable[[dict[str, np.ndarray]], T],
    ) -> None:
        self._rows = rows
        self._make = make
        self._unmade: dict[str, np.ndarray] | None = None

    def __next__(self) -> _Made[T]:
        if self._unmade is None:
            self._unmade = next(self._rows)
        what = self._make(self._unmade)
        self._unmade = None
        return what, self._rows.get_state()


def _watched(call: Callable[[], T], began: float) -> T:
    # The thread does nothing else, so its CPU time is spent on rows.
    busy_secs, secs = time.thread_time(), time.monotonic() - began
    if busy_secs > max(_LEAST_SECS, _MOST_SHARE * secs):
        logging.log_first_n(
            logging.WARNING,
            "a thread spends %.0f%% of its time building rows, which slows down this"
            " process's steps; set num_workers=1 to build rows in a worker process, or"
            " num_workers=0 to keep building them in this process without this warning",
            1,
            100 * busy_secs / secs,
        )
    return call()


def _close(
    rows: elastic_data.HostBatches,
    calls: background.BackgroundCalls[Any] | None,
    *,
    wait: bool,
) -> None:
    if calls is None:
        rows.close()
    else:
        # The thread closes the rows, because it may be reading them.
        calls.close(rows.close, wait=wait)
