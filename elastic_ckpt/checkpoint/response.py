"""Responses to calls that run in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Response(Generic[T]):
    """A running call, as Orbax's `AsyncResponse`.

    Args:
      doing: completed when the call is done.
    """

    def __init__(self, doing: futures.Future[T]) -> None:
        self._doing = doing

    def result(self, timeout: float | None = None) -> T:
        """Waits for the call, and returns what it returns.

        Raises:
          Exception: as the call.
          TimeoutError: if that takes more than `timeout` seconds.
        """
        return self._doing.result(timeout)

    def on_complete(self, callback: Callable[[T], Any]) -> None:
        """Calls `callback(result)` from a background thread; never after an error."""

        def call(done: futures.Future[T]) -> None:
            if done.exception() is None:
                callback(done.result())

        self._doing.add_done_callback(call)


class SaveResponse(Response[bool]):
    """A save under way: its result is whether the step was committed, or given up.

    With a local tier a step is committed when it is in the RAM of all hosts; without
    one, when it is in persistent storage.

    Args:
      committed: completed when the step is committed or given up.
      is_stored: waits for all stages; whether the step is in persistent storage.
    """

    def __init__(
        self, committed: futures.Future[bool], is_stored: Callable[[], bool]
    ) -> None:
        super().__init__(committed)
        self._is_stored = is_stored

    def durable(self) -> bool:
        """Waits for backups, too; whether the step is in persistent storage.

        Every process of the world calls it.
        """
        return self.result() and self._is_stored()

    def on_complete(self, callback: Callable[[bool], Any]) -> None:
        """Calls `callback(committed)` from a background thread, also after an error."""
        self._doing.add_done_callback(
            lambda done: callback(done.exception() is None and done.result())
        )
