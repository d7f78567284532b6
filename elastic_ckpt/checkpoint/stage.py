"""A stage: a thread that does one thing at a time, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")


class Stage:
    """Does what it is given, one thing at a time, in a thread.

    A program that ends does not wait for it: hosts that are gone never answer.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._doing: futures.Future[Any] | None = None

    @property
    def idle(self) -> bool:
        """Whether what it was given is done."""
        return self._doing is None or self._doing.done()

    def start(self, work: Callable[[], T]) -> futures.Future[T]:
        """Begins `work`, once what it does now is done, whether or not that failed."""
        self.wait()
        doing: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                doing.set_result(work())
            # The root of a thread: the future raises it to the holder of a response.
            except BaseException as error:
                doing.set_exception(error)

        self._doing = doing
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return doing

    def wait(self) -> None:
        """Returns when what it was given is done, whether or not that failed."""
        doing, self._doing = self._doing, None
        if doing is not None:
            futures.wait([doing])
