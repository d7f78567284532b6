"""Shows a run's events: one line that moves on a terminal, a few lines elsewhere."""

from __future__ import annotations

import collections
import shutil
import sys
from typing import Any, TextIO

from elastic_ckpt.core import events, storage


class Progress:
    """An `Emit` for people.

    Args:
      log_period: steps between two lines where `stream` is not a terminal.
      stream: where to write.
    """

    def __init__(self, log_period: int, stream: TextIO = sys.stdout) -> None:
        self._log_period = log_period
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._moving = False  # whether the last thing written is the moving line
        self._world = ""
        self._saved = "nothing saved yet"
        self._recent_secs: collections.deque[float] = collections.deque(maxlen=10)

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows one event."""
        events.check(name, fields)
        getattr(self, f"_on_{name}")(**fields)

    def _on_run_started(self, **event: Any) -> None:
        self._world = (
            f"{_count(event['hosts'], 'host')}, {_count(event['slices'], 'slice')},"
            f" {_count(event['devices'], 'device')}"
        )
        since = f"from step {event['start_step']} " if event["start_step"] else ""
        self._line(f"{event['run']}: {since}to step {event['steps']} on {self._world}")

    def _on_step_interrupted(self, **event: Any) -> None:
        self._line(
            f"step {event['step']} was interrupted while it was saved and is passed"
            f" over ({event['path']}); the newest complete step is"
            f" {event['resume_step']}"
        )

    def _on_restored(self, **event: Any) -> None:
        self._saved = f"saved step {event['step']}"
        self._line(f"restored {event['path']} in {event['secs']:.1f} s")

    def _on_restored_from(self, **event: Any) -> None:
        self._saved = f"saved step {event['step']}"
        parts = [
            f"{_bytes(event[f'{near}_bytes'])} {where}"
            for near, where in _NEARNESS.items()
            if event[f"{near}_bytes"]
        ]
        bad = ""
        if event["bad_copies"]:
            bad = f"; {event['repaired']} of {event['bad_copies']} bad copies put right"
        self._line(f"restored step {event['step']}: {', '.join(parts)}{bad}")

    def _on_step_passed_over(self, **event: Any) -> None:
        self._line(f"passed over: {event['why']}")

    def _on_degraded(self, **event: Any) -> None:
        self._line(f"{event['tier']} tier, step {event['step']}: {event['why']}")

    def _on_replicated(self, **event: Any) -> None:
        pass

    def _on_backed_up(self, **event: Any) -> None:
        self._saved = f"backed up step {event['step']}"

    def _on_step(self, **event: Any) -> None:
        self._recent_secs.append(event["secs"])
        rate = len(self._recent_secs) / max(sum(self._recent_secs), 1e-9)
        text = (
            f"step {event['step']}/{event['steps']} | loss {event['loss']:.4f}"
            f" | {rate:.1f} steps/s | {self._world} | {self._saved}"
        )
        if self._is_terminal:
            # A line that wraps could not be written over.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\033[K{text[:width]}")
            self._stream.flush()
            self._moving = True
        elif event["step"] % self._log_period == 0 or event["step"] == event["steps"]:
            self._line(text)

    def _on_save_started(self, **event: Any) -> None:
        self._saved = f"saving step {event['step']}"

    def _on_saved(self, **event: Any) -> None:
        self._saved = f"saved step {event['step']}"

    def _on_evaluated(self, **event: Any) -> None:
        batches = _count(event["batches"], "batch", "es")
        self._line(
            f"step {event['step']}: evaluated {batches}, loss {event['loss']:.4f}"
        )

    def _on_data_ended(self, **event: Any) -> None:
        self._line(f"the data ended after step {event['step']}")

    def _on_run_finished(self, **event: Any) -> None:
        self._line(f"step {event['step']} is done, after {event['secs']:.1f} s")

    def _line(self, text: str) -> None:
        self._stream.write(f"\n{text}\n" if self._moving else f"{text}\n")
        self._moving = False
        self._stream.flush()


_NEARNESS = {
    "local": "from this host's RAM",
    "close": "from close peers",
    "distant": "from distant peers",
    "persistent": "from persistent storage",
}


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + plural * (number != 1)
