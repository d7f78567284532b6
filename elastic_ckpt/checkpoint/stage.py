"""A stage: a thread that does one thing at a time, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stage:
    """Does what it is given, one thing at a time, in a thread.

    A program that ends does not wait for it: hosts that are gone never answer.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether what it was given is done."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`, once what it does now is done and raised no error."""
        self.wait()

        def run() -> None:
            try:
                work()
            # The root of a thread: whoever waits for it raises this.
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when what it was given is done, and raises what that raised, once."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
