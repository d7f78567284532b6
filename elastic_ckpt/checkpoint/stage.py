"""A stage: a thread that does one thing at a time, beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures


class Stage:
    """Does what it is given, one thing at a time, in a thread of its own.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._doing: futures.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether what it was given is done."""
        return self._doing is None or self._doing.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`, once what it does now is done and raised no error."""
        self.wait()
        self._doing = self._thread.submit(work)

    def wait(self) -> None:
        """Returns when what it was given is done, and raises what that raised, once."""
        doing = self._doing
        if doing is None:
            return
        try:
            doing.result()
        finally:
            self._doing = None

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
