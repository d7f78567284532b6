"""A bound on bytes per second, shared by all transfers of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Unused bandwidth is kept for this long, so that the limit costs nothing below it.
_BURST_SECS = 0.125
# A transfer never takes more at once: others get their turn in between.
_TURN_SECS = 1 / 32


class Bandwidth:
    """A token bucket: it returns how long to wait, and never waits itself.

    Any thread may call it.

    Args:
      bytes_per_sec: above 0.
      clock: seconds that only grow.
    """

    def __init__(
        self, bytes_per_sec: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_sec = bytes_per_sec
        self._clock = clock
        self._lock = threading.Lock()
        # When all that was taken so far will have been paid for.
        self._paid = clock()

    def piece_bytes(self, most: int) -> int:
        """How much to transfer at once, at least 1 and at most `most` bytes."""
        return max(1, min(most, int(self._bytes_per_sec * _TURN_SECS)))

    def take(self, num_bytes: int) -> float:
        """Takes `num_bytes`; the seconds to wait before the next are transferred."""
        with self._lock:
            now = self._clock()
            begin = max(self._paid, now - _BURST_SECS)
            self._paid = begin + num_bytes / self._bytes_per_sec
            return max(0.0, self._paid - now)
