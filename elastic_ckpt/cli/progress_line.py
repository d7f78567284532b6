"""The progress of a verb in bytes: one line that moves on a terminal."""

from __future__ import annotations

import math
import sys
import time

_MOVES_SECS = 0.2
_GIB = 2**30


class ProgressLine:
    """Prints the progress to standard error; call it with the bytes done and of all.

    Args:
      verb: what is done with the bytes: `read`, `wrote`.
      log_secs: where there is no terminal, the time between two lines; by default none
        are printed.
    """

    def __init__(self, verb: str, *, log_secs: float = math.inf) -> None:
        self._verb = verb
        self._moves = sys.stderr.isatty()
        self._pause_secs = _MOVES_SECS if self._moves else log_secs
        # On a terminal the first line comes at once.
        self._shown_secs = -math.inf if self._moves else time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Shows the progress, if it was last shown long enough ago."""
        now_secs = time.monotonic()
        if now_secs - self._shown_secs >= self._pause_secs:
            self._shown_secs = now_secs
            self._show(f"{self._verb} {done / _GIB:.2f} of {total / _GIB:.2f} GiB")

    def end(self) -> None:
        """Removes a line that moves."""
        if self._moves:
            self._show("")

    def _show(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if self._moves else f"{text}\n")
        sys.stderr.flush()
