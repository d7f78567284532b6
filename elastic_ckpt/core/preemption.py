"""The count of steps by which all parts of a process ask JAX's preemption service.

The service lets all hosts of a world agree on a step to end after, once one of them got
SIGTERM: the one after the newest that any host has asked about. It answers for that
number alone: a run that never asks about it would never end. And a process has one such
number, which is 0 until the first question; a world that begins at step 1000 and gets
the signal before would wait for step 1.

So within `counting` the first step that any part asks about is 1, and each one that is
newer has the next number. A part that counts otherwise than another, as a loop that
saves step N + 1 and then asks about step N, gets the number of that one. Questions
about two older steps in a row are of a run that has gone back: there the numbers go on.

The part that asks by the agreed number may not be the one that leaves: once one of them
was told, so are all that ask later, on each host from the same question on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class _Count:
    """How steps are counted: as they are, or from the first that is asked about."""

    def __init__(self) -> None:
        self.is_relative = False
        self.begin()

    def begin(self) -> None:
        """Counts from the next step that is asked about."""
        self._number = 0
        # The newest step, and an older one if the last question was about that.
        self._newest: int | None = None
        self._older: int | None = None
        self._is_reached = False

    def reached(self, step: int, ask: Callable[[int], bool]) -> bool:
        """Whether the hosts have agreed to end; see `preemption.reached`."""
        if not self.is_relative:
            return ask(step)
        is_older = self._newest is not None and step < self._newest
        has_gone_back = is_older and self._older not in (None, step)
        if self._newest is None or step > self._newest or has_gone_back:
            self._number += 1
            self._newest = step
        self._older = step if is_older and not has_gone_back else None
        self._is_reached = self._is_reached or ask(self._number)
        return self._is_reached


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


def reached(step: int, ask: Callable[[int], bool]) -> bool:
    """Whether the hosts have agreed to end after `step`, or after one before it.

    Args:
      step: that is asked about; all hosts ask about the same ones.
      ask: asks the service by a number.
    """
    return _COUNT.reached(step, ask)
