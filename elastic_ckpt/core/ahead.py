"""Calls in a thread of their own, ahead of whoever takes the results.

And what has to be closed, with the thread, when nobody holds it any more.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, Generic, Protocol, TypeVar

from absl import logging

from elastic_ckpt.core import errors

T = TypeVar("T")

# How long to wait for a call that is under way, when nobody wants its result any more.
_CLOSE_SECS = 10.0


class Close(Protocol):
    """Ends something; waits for it, if it may."""

    def __call__(self, *, wait: bool) -> None:
        """Ends it."""


_to_close: dict[weakref.ref[object], Close] = {}


class Ahead(Generic[T]):
    """Calls a function in a thread of its own, ahead of who takes the results.

    The first call is made when the first result is asked for. Results, and errors, come
    in the order of the calls.

    Args:
      call: the function.
      depth: calls that are ahead, at least 1.
    """

    def __init__(self, call: Callable[[], T], *, depth: int) -> None:
        self._call = call
        self._depth = depth
        self._closed = False
        self._pending: collections.deque[futures.Future[T]] = collections.deque()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # A daemon: a read that hangs must not keep the program from ending.
        self._thread = threading.Thread(
            target=_work, args=(self._tasks,), name="elastic_ckpt-ahead", daemon=True
        )
        self._thread.start()

    def take(self) -> T:
        """The next result; waits for it, and raises what the call raised."""
        while len(self._pending) <= self._depth:
            self._pending.append(self.submit(self._call))
        due = self._pending[0]
        # Whoever is interrupted here has not taken it: it is still the next.
        futures.wait([due])
        # Unless another thread has dropped all meanwhile.
        if self._pending:
            self._pending.popleft()
        return due.result()

    def submit(self, call: Callable[[], Any]) -> futures.Future[Any]:
        """Makes another call in the same thread, after those that are under way.

        Raises:
          DataError: if the thread has ended.
        """
        if self._closed:
            raise errors.DataError("this iterator was closed; make a new one")
        task = _Task(call=call, future=futures.Future())
        self._tasks.put(task)
        return task.future

    def num_ready(self) -> int:
        """Results that can be taken without waiting."""
        return sum(future.done() for future in self._pending)

    def drop(self) -> None:
        """Forgets the results that nobody took; a call under way is still finished."""
        while self._pending:
            self._pending.pop().cancel()

    def close(
        self, last: Callable[[], object] | None = None, *, wait: bool = True
    ) -> None:
        """Ends the thread, after `last` was called in it.

        If a call hangs, it is left to itself after a while; without `wait` at once.
        """
        if self._closed:
            return
        self.drop()
        ended = self.submit(last or _nothing)
        self._closed = True
        self._tasks.put(None)
        # The thread itself cannot wait for its own end.
        if not wait or threading.current_thread() is self._thread:
            return
        try:
            ended.result(_CLOSE_SECS)
        except futures.TimeoutError:
            logging.warning(
                "what reads ahead has not come back for %g s; it is left alone",
                _CLOSE_SECS,
            )


def close_with(owner: object, close: Close) -> None:
    """Has `close` called when `owner` is gone, or before the program ends.

    It waits only at the end: whoever collects garbage must not wait for a read that is
    under way. `close` must not hold `owner`, and may be called twice.
    """

    def gone(reference: weakref.ref[object]) -> None:
        # None if it is being closed at the end of the program.
        if close := _to_close.pop(reference, None):
            close(wait=False)

    if not _to_close:
        # Handlers run in the reverse order of their registration: late is early.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _to_close[weakref.ref(owner, gone)] = close


def _close_all() -> None:
    while _to_close:
        _, close = _to_close.popitem()
        close(wait=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    call: Callable[[], Any]
    future: futures.Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call())
        except BaseException as error:  # the root of a thread: whoever takes it raises
            self.future.set_exception(error)


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        # What it made is only for whoever takes it.
        del task


def _nothing() -> None:
    pass
