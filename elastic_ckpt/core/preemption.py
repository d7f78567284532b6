"""Numbers the steps about which a process asks JAX's preemption service.

Once a host gets SIGTERM, the service lets all hosts of a world agree on a last step:
the step after the newest one that any host has asked about. The service says yes only
for that number, so a run that never asks about it never stops. The newest number is 0
until the first question: a world that begins at step 1000 and gets the signal before
its first question would wait for step 1.

So within `counting`, the first step that is asked about is number 1, and each newer
step gets the next number. Parts of a program may count differently: if a loop saves
step N + 1 and then asks about step N, both get the same number. Questions about two
different older steps in a row mean that the run has rolled back; they get new numbers.

The part that asks about the agreed number may not be the part that stops the run. So
after the first yes, all later questions get a yes. Hosts ask the same questions, so
they get their first yes at the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class _Count:
    """The step count from the first question on.

    Attributes:
      number: the newest step's number in this count.
      older: the step that the last question was about, if it was an older step.
      is_reached: whether the hosts have agreed to stop.
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


# One per process, like the service; if None, questions use the step number itself.
_count: _Count | None = None


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Numbers steps from the first question on, while the block runs."""
    global _count
    _count = _Count()
    try:
        yield
    finally:
        _count = None


def reached(step: int, ask: Callable[[int], bool]) -> bool:
    """Whether the hosts have agreed to stop after `step` or an earlier step.

    All hosts must ask about the same steps. `ask` must ask the service about a number.
    """
    return ask(step) if _count is None else _count.reached(step, ask)
