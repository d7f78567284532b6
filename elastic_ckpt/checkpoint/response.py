"""Responses to calls that run in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any, Generic, TypeVar

from elastic_ckpt.core import background

T = TypeVar("T")


class Response(Generic[T]):
    """The result of a background call, like Orbax's `AsyncResponse`.

    Args:
      doing: a future that completes when the call is done.
    """

    def __init__(self, doing: futures.Future[T]) -> None:
        self._doing = doing

    def result(self, timeout: float | None = None) -> T:
        """Waits for the call to finish and returns its result.

        Args:
          timeout: the maximum time to wait, in seconds; None sets no limit.

        Raises:
          Exception: the error of the call, if it failed.
          TimeoutError: if the call does not finish in time; the call continues.
        """
        if timeout is None:
            background.wait([self._doing])
        return self._doing.result(timeout)

    def on_complete(self, callback: Callable[[T], Any]) -> None:
        """Calls `callback(result)` from a background thread, unless the call fails."""

        def call(done: futures.Future[T]) -> None:
            if done.exception() is None:
                callback(done.result())

        self._doing.add_done_callback(call)


class SaveResponse(Response[bool]):
    """A background save. Its result says whether the step was committed.

    With a local tier, a step is committed once it is in the RAM of all hosts; without a
    local tier, once it is in persistent storage. The result is False if the save was
    abandoned after an error; an event describes the error.

    Args:
      committed: a future that completes when the step is committed or abandoned.
      is_stored: a function that waits for all stages and returns whether the step is in
        storage.
    """

    def __init__(
        self, committed: futures.Future[bool], is_stored: Callable[[], bool]
    ) -> None:
        super().__init__(committed)
        self._is_stored = is_stored

    def durable(self) -> bool:
        """Waits for the step's copies and backup, if they are due.

        Every process of the run must call this.

        Returns:
          Whether the step is in persistent storage.
        """
        return self.result() and self._is_stored()

    def on_complete(self, callback: Callable[[bool], Any]) -> None:
        """Calls `callback(committed)` from a background thread, even after an error."""
        self._doing.add_done_callback(
            lambda done: callback(done.exception() is None and done.result())
        )
