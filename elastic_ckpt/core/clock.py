"""The clock of this process, which simulations replace by a virtual one.

Decisions that depend on time read it here: names of saves, periods, leases, retries.
Durations that are only reported do not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """The clock of the system."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds since some moment, never set back."""
        return time.monotonic()

    def sleep(self, secs: float) -> None:
        """Returns after so many seconds."""
        time.sleep(secs)


_clock = Clock()


def time_ns() -> int:
    """See `Clock`."""
    return _clock.time_ns()


def monotonic() -> float:
    """See `Clock`."""
    return _clock.monotonic()


def sleep(secs: float) -> None:
    """See `Clock`."""
    _clock.sleep(secs)


@contextlib.contextmanager
def replaced(clock: Clock) -> Iterator[None]:
    """Has this process read `clock` while the block runs."""
    global _clock
    outer, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = outer
