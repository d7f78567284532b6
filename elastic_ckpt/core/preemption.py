"""The count of steps by which all parts of a process ask JAX's preemption service.

The service lets all hosts of a world agree on a step to end after, once one of them got
SIGTERM: the one after the newest that any host has asked about. A process has one such
number, so all parts that ask have to count alike. The number is 0 until the first
question; a world that begins at step 1000 and gets the signal before would wait for
step 1. So within `counting` the first step that any part asks about is 1. The numbers
go on when a run goes back to an older step: the service takes -1 for its agreed number
as long as there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class _Count:
    """How steps are counted: as they are, or from the first that is asked about."""

    def __init__(self) -> None:
        self.is_relative = False
        self.first: int | None = None
        self._last = 0

    def number(self, step: int) -> int:
        """The number of `step` for the service."""
        if not self.is_relative:
            return step
        if self.first is None:
            self.first = step
        elif step < self._last:
            self.first += step - self._last - 1
        self._last = step
        return step - self.first + 1


# As the service, one for a process.
_COUNT = _Count()


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Counts from the first step that is asked about, while the block runs."""
    _COUNT.is_relative, _COUNT.first = True, None
    try:
        yield
    finally:
        _COUNT.is_relative = False


def count(step: int) -> int:
    """The number by which the service is asked about `step`."""
    return _COUNT.number(step)
