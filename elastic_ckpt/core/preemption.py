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
import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class _Count:
    """How steps are counted from the first that is asked about.

    Attributes:
      number: of the newest step.
      newest: the newest step, None before the first.
      older: an older one, if the last question was about that.
      is_reached: whether the hosts have agreed to end.
    """

    number: int = 0
    newest: int | None = None
    older: int | None = None
    is_reached: bool = False

    def reached(self, step: int, ask: Callable[[int], bool]) -> bool:
        """See `preemption.reached`."""
        is_older = self.newest is not None and step < self.newest
        has_gone_back = is_older and self.older not in (None, step)
        if self.newest is None or step > self.newest or has_gone_back:
            self.number += 1
            self.newest = step
        self.older = step if is_older and not has_gone_back else None
        self.is_reached = self.is_reached or ask(self.number)
        return self.is_reached


# As the service, one for a process; None counts steps as they are.
_count: _Count | None = None


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Counts from the first step that is asked about, while the block runs."""
    global _count
    _count = _Count()
    try:
        yield
    finally:
        _count = None


def reached(step: int, ask: Callable[[int], bool]) -> bool:
    """Whether the hosts have agreed to end after `step`, or after one before it.

    Args:
      step: that is asked about; all hosts ask about the same ones.
      ask: asks the service by a number.
    """
    return ask(step) if _count is None else _count.reached(step, ask)
