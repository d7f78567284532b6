"""The progress of a verb in bytes: on a terminal, one line that changes."""

from __future__ import annotations

import sys
import time

# The time between updates on a terminal, and between lines in a log.
_MOVES_SECS, _LOG_SECS = 0.2, 10.0
_GIB = 2**30


class ProgressLine:
    """Prints progress to standard error; call it with the bytes done and the total.

    Args:
      verb: a past-tense verb, such as `read` or `wrote`.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._moves = sys.stderr.isatty()
        self._next_secs = time.monotonic() + (0.0 if self._moves else _LOG_SECS)

    def __call__(self, done: int, total: int) -> None:
        """Shows the progress, but not too often."""
        now_secs = time.monotonic()
        if now_secs >= self._next_secs:
            self._next_secs = now_secs + (_MOVES_SECS if self._moves else _LOG_SECS)
            self._show(f"{self._verb} {done / _GIB:.2f} of {total / _GIB:.2f} GiB")

    def end(self) -> None:
        """Removes the line from a terminal."""
        if self._moves:
            self._show("")

    def _show(self, text: str) -> None:
        line = f"\r\033[K{text}" if self._moves else f"{text}\n"
        print(line, end="", file=sys.stderr, flush=True)
