"""The response to a save that goes on in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures


class Response:
    """A save under way, as Orbax's `AsyncResponse`."""

    def __init__(self, committed: futures.Future[bool]) -> None:
        self._committed = committed

    def result(self, timeout: float | None = None) -> bool:
        """Waits until the step is committed or given up; whether it was committed.

        Raises:
          Exception: if the commit failed otherwise than hosts report it.
          TimeoutError: if that takes more than `timeout` seconds.
        """
        return self._committed.result(timeout)

    def on_complete(self, callback: Callable[[bool], None]) -> None:
        """Calls `callback(committed)` from a background thread, also after an error."""
        self._committed.add_done_callback(
            lambda done: callback(done.exception() is None and done.result())
        )
