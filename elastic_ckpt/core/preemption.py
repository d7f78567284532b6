"""The count of steps by which all parts of a process ask JAX's preemption service.

The service lets all hosts of a world agree on a step to end after, once one of them got
SIGTERM: the one after the newest that any host has asked about. It answers for that
number alone: a run that never asks about it would never end. And a process has one such
number, which is 0 until the first question; a world that begins at step 1000 and gets
the signal before would wait for step 1.

So within `counting` the first step that any part asks about is 1, and each one that is
newer has the next number. A part that counts otherwise than another, as a loop that
saves step N + 1 and then asks about step N, gets the number of that one. Two questions
about older steps in a row are of a run that has gone back: there the numbers go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class _Count:
    """How steps are counted: as they are, or from the first that is asked about."""

    def __init__(self) -> None:
        self.is_relative = False
        self.begin()

    def begin(self) -> None:
        """Counts from the next step that is asked about."""
        self._number = 0
        # The newest step, and whether the last question was about an older one.
        self._newest: int | None = None
        self._was_older = False

    def number(self, step: int) -> int:
        """The number of `step` for the service."""
        if not self.is_relative:
            return step
        is_older = self._newest is not None and step < self._newest
        has_gone_back = is_older and self._was_older
        if self._newest is None or step > self._newest or has_gone_back:
            self._number += 1
            self._newest = step
        self._was_older = is_older and not has_gone_back
        return self._number


# As the service, one for a process.
_COUNT = _Count()


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Counts from the first step that is asked about, while the block runs."""
    _COUNT.is_relative = True
    _COUNT.begin()
    try:
        yield
    finally:
        _COUNT.is_relative = False


def count(step: int) -> int:
    """The number by which the service is asked about `step`."""
    return _COUNT.number(step)
