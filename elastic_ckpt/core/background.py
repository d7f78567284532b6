"""Function calls in background threads, and cleanup when the process exits.

`in_thread` makes one call, `pool` makes several calls concurrently, and `wait` waits
for calls. `BackgroundCalls` calls a function repeatedly, before its results are needed.
`close_with` closes a resource when its owner is garbage-collected or the process exits.
`before_exit` finishes work that still needs thread pools.

Simulations replace `in_thread`, `pool` and `wait`: one thread makes all calls, in an
order that the simulation chooses.
"""

from __future__ import annotations

import atexit
import collections
import queue
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any, Generic, NoReturn, TypeVar

from absl import logging

from elastic_ckpt.core import errors

T = TypeVar("T")
_Task = tuple[Callable[[], Any], futures.Future[Any]]

# How long `close` waits for a call in progress, whose result is no longer needed.
_CLOSE_SECS = 10.0


def in_thread(call: Callable[[], T], *, name: str) -> futures.Future[T]:
    """Calls a function in a new daemon thread and returns the future of its result."""
    future: futures.Future[T] = futures.Future()
    threading.Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def pool(num_threads: int, name: str) -> futures.Executor:
    """An executor with `num_threads` threads, whose names begin with `name`."""
    return futures.ThreadPoolExecutor(num_threads, thread_name_prefix=name)


def wait(pending: Collection[futures.Future[Any]]) -> None:
    """Waits until all calls have returned or failed."""
    futures.wait(pending)


class BackgroundCalls(Generic[T]):
    """Calls a function in a background thread before its results are needed.

    `begin` or the first `take` makes the first call. Results and errors come in the
    order of the calls.

    Args:
      call: the function.
      depth: how many calls to make ahead of the last result taken, at least 1.
    """

    def __init__(self, call: Callable[[], T], *, depth: int) -> None:
        self._call = call
        self._depth = depth
        self._closed = False
        self._pending: collections.deque[futures.Future[T]] = collections.deque()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # A daemon thread, so that a hanging read does not keep the process alive.
        self._thread = threading.Thread(
            target=_work,
            args=(self._tasks,),
            name="elastic_ckpt-background",
            daemon=True,
        )
        self._thread.start()

    def begin(self) -> None:
        """Begins the first call."""
        if not self._pending:
            self._pending.append(self.submit(self._call))

    def take(self) -> T:
        """Waits for the next result and returns it, or raises the call's error."""
        while len(self._pending) <= self._depth:
            self._pending.append(self.submit(self._call))
        due = self._pending[0]
        # After an interruption here (Ctrl-C), this result is still the next one.
        futures.wait([due])
        # Another thread may have dropped all results in the meantime.
        if self._pending:
            self._pending.popleft()
        return due.result()

    def submit(self, call: Callable[[], Any]) -> futures.Future[Any]:
        """Queues a call of another function in the same thread, after all queued calls.

        Raises:
          DataError: if the thread has stopped.
        """
        if self._closed:
            closed()
        future: futures.Future[Any] = futures.Future()
        self._tasks.put((call, future))
        return future

    def num_ready(self) -> int:
        """The number of results that `take` returns without waiting."""
        return sum(future.done() for future in self._pending)

    def drop(self) -> None:
        """Discards the results not yet taken; a call in progress still finishes."""
        while self._pending:
            self._pending.pop().cancel()

    def close(
        self, last: Callable[[], object] | None = None, *, wait: bool = True
    ) -> None:
        """Stops the thread, optionally after one last call in it.

        Args:
          last: a function to call in the thread before the thread stops.
          wait: whether to wait until the thread stops, at most 10 s if a call hangs.
        """
        if self._closed:
            return
        self.drop()
        ended = self.submit(last or (lambda: None))
        self._closed = True
        self._tasks.put(None)
        # The thread cannot wait for itself.
        if not wait or threading.current_thread() is self._thread:
            return
        try:
            ended.result(_CLOSE_SECS)
        except futures.TimeoutError:
            logging.warning(
                "a background call has not returned within %g s; its thread is"
                " abandoned",
                _CLOSE_SECS,
            )


def closed() -> NoReturn:
    """Raises a DataError that says that an iterator was closed."""
    raise errors.DataError("this iterator was closed; create a new one")


def close_with(owner: object, close: Callable[..., None]) -> None:
    """Calls `close` once `owner` is garbage-collected, or before the process exits.

    Args:
      owner: the object that owns the resource.
      close: a function that closes the resource. When the process exits, the function
        is called with `wait=True` and must return only once the resource is closed. At
        garbage collection, it is called with `wait=False` and must not block on a read
        in progress. It must not refer to `owner` and may be called twice.
    """

    def at_exit() -> None:
        close(wait=True)

    def gone() -> None:
        atexit.unregister(at_exit)
        close(wait=False)

    # Handlers run in reverse order of registration.
    atexit.register(at_exit)
    weakref.finalize(owner, gone).atexit = False  # pyrefly: ignore


def before_exit(finish: Callable[[], None]) -> Callable[[], None]:
    """Calls `finish` when the main thread exits, while thread pools still accept work.

    Returns:
      A function that cancels the call to `finish` and may be called repeatedly.
    """
    pending = [finish]
    # `atexit` handlers run when thread pools already refuse work. `threading` shuts
    # the pools down by the same registry, in reverse order of registration.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(lambda: [each() for each in pending])
    return pending.clear


def _run(call: Callable[[], T], future: futures.Future[T]) -> None:
    # The thread's entry point.
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        _run(*task)
        # The thread must not keep the result alive.
        del task
