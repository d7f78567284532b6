"""A stage: a thread that does one thing at a time, beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

from elastic_ckpt.core import background

T = TypeVar("T")


class Stage:
    """Runs one piece of work at a time, in a thread.

    The thread is a daemon: at exit a program must not wait for hosts that are gone.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._doing: futures.Future[Any] | None = None

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return self._doing is None or self._doing.done()

    def start(self, work: Callable[[], T]) -> futures.Future[T]:
        """Begins `work` when the work before has ended, also if that failed."""
        self.wait()
        doing = background.in_thread(work, name=self._name)
        self._doing = doing
        return doing

    def wait(self) -> None:
        """Returns when its work has ended, also if it failed."""
        doing = self._doing
        if doing is not None:
            # After an interruption here (Ctrl-C) it still has its work.
            background.wait([doing])
        if self._doing is doing:
            self._doing = None
