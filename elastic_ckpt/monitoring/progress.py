"""Shows a run's events: one updating line on a terminal, a few lines elsewhere.

`core.events` has the line for each event and the phase that the event begins. After a
few seconds without an event, the current phase is shown again to distinguish a run that
starts, compiles or saves from a run that hangs.
"""

from __future__ import annotations

import collections
import shutil
import string
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from elastic_ckpt.core import events, storage_cause

_SILENCE_SECS = 4.5
# In a log, only a step that takes much longer than the others breaks the silence.
_SLOW_STEP_RATIO = 10
_WORLD = "{hosts:count host}, {slices:count slice}, {devices:count device}"
# The number of recent steps whose rate a line shows.
_RECENT_STEPS = 10
# How the lines of later steps report saves.
_SAVES = {
    "save_started": "saving step {step}",
    "saved": "saved step {step}",
    "backed_up": "backed up step {step}",
    "restored_from": "saved step {step}",
}


class _Words(string.Formatter):
    """Formats event texts.

    `{n:count host}` is "1 host" or "2 hosts", `{n:bytes}` is "3.0 MiB", and lists are
    separated by commas. The following omit empty values: `{n:after , spare: }` puts
    text before a value; `{n:bytes of RAM}` and `{secs:phase end}` are parts of a list.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, text = format_spec.partition(" ")
        if kind == "count":
            plural = "es" if text.endswith("ch") else "s"
            return f"{value} {text}" + plural * (value != 1)
        if kind == "after":
            return f"{text}{self.format_field(value, '')}" if value else ""
        if kind == "phase":
            return f", {text} {value:.1f}" if value >= 0.05 else ""
        if kind == "bytes":
            size = f"{value / 2**20:,.1f} MiB"
            part = f", {size} {text}" if value else ""
            return part if text else size
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return super().format_field(value, format_spec)


def _formatted(text: str, fields: Mapping[str, Any]) -> str:
    # Drops the comma before the first part of a list.
    line = _Words().vformat(text, (), fields)
    return line.replace(": , ", ": ").replace("(, ", "(").replace(": ;", ";")


class Progress:
    """A human-readable `Emit`; while it is open, a thread breaks long silences.

    Args:
      log_period: the number of steps between lines if `stream` is not a terminal.
      stream: the stream to write to; None uses the current standard output.
    """

    def __init__(
        self,
        log_period: int,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_period = log_period
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._moving = False  # whether the last thing written is the moving line
        self._world = self._saved = ""
        # The reasons already shown why storage accepts no steps.
        self._causes: set[str] = set()
        # When the last steps were completed.
        self._step_times: collections.deque[float] = collections.deque(
            maxlen=_RECENT_STEPS + 1
        )
        self._phase = "starting"
        # When the phase began; the time of the last output or step.
        self._phase_secs = self._shown_secs = clock()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> Progress:
        threading.Thread(
            target=self._break_silences, name="progress", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread and ends the updating line."""
        with self._lock:
            self._closed.set()
            if self._moving:
                self._write("\n", moving=False)

    def __call__(self, name: str, **fields: Any) -> None:
        """Shows one event."""
        events.check(name, fields)
        text, begins = events.NAMES[name].text, events.NAMES[name].begins
        with self._lock:
            if name in _SAVES:
                self._saved = _formatted(_SAVES[name], fields)
            match name:
                case "step" | "step_done":
                    self._step(fields)
                    return
                case "run_started":
                    self._world = _formatted(_WORLD, fields)
                case "run_failed" | "run_stopped":
                    text = self._ended(fields)
                case "degraded":
                    text = self._degraded(fields)
                case "storage_recovered":
                    self._causes.clear()
                case "leader_found":
                    # The leader shows the run's phases.
                    is_leader = fields["machine"] == fields["leader"]
                    begins = "waiting for machines" if is_leader else events.ENDS[0]
            if text:
                self._line(_formatted(text, fields))
            if begins:
                self._phase = "" if begins in events.ENDS else begins
                self._phase_secs = self._clock()
                self._step_times.clear()

    def remind(self) -> None:
        """Shows the current phase if nothing has been shown for a while."""
        with self._lock:
            silence_secs = _SILENCE_SECS
            if not self._is_terminal and (rate := self._rate()):
                silence_secs = max(silence_secs, _SLOW_STEP_RATIO / rate)
            now_secs = self._clock()
            is_silent = now_secs - self._shown_secs >= silence_secs
            if self._phase and is_silent and not self._closed.is_set():
                secs = now_secs - self._phase_secs
                self._show(f"{self._phase}, for {secs:.0f} s now", is_logged=True)

    def _break_silences(self) -> None:
        while not self._closed.wait(0.25):
            self.remind()

    def _rate(self) -> float:
        # The rate of recent steps in steps per second; 0 before the second one.
        times = self._step_times
        return (len(times) - 1) / max(times[-1] - times[0], 1e-9) if times else 0.0

    def _step(self, event: Mapping[str, Any]) -> None:
        # A user's loop may report only that a step is completed.
        step, steps, loss = event["step"], event.get("steps"), event.get("loss")
        self._phase_secs = self._shown_secs = self._clock()
        self._step_times.append(self._shown_secs)
        of_all = "" if steps is None else f"/{steps}"
        parts = (
            f"step {step}{of_all}",
            "" if loss is None else f"loss {loss:.4f}",
            f"{self._rate():.1f} steps/s" if self._rate() else "",
            self._world,
            self._saved,
        )
        is_logged = step % self._log_period == 0 or step == steps
        self._show(" | ".join(filter(None, parts)), is_logged=is_logged)
        if step == steps:
            self._phase = f"step {step} is done and is being saved"
        elif self._phase != events.NAMES["stop_requested"].begins:
            self._phase = f"step {step + 1}{of_all}"

    def _line(self, text: str) -> None:
        self._write("\n" * self._moving + text + "\n", moving=False)

    def _show(self, text: str, *, is_logged: bool) -> None:
        # Updates the line on a terminal; writes a new line elsewhere.
        if self._is_terminal:
            # A line that wraps could not be overwritten.
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\033[K{text[:width]}", moving=True)
        elif is_logged:
            self._line(text)

    def _write(self, text: str, *, moving: bool) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._moving, self._shown_secs = moving, self._clock()

    def _ended(self, event: Mapping[str, Any]) -> str:
        when = "after step {step}" if self._world else "before it began"
        again = "the same command continues it from the newest complete step, if any"
        if "saved" not in event:
            # The command itself prints the error before it exits.
            return f"the run failed {when}; once the cause is fixed, {again}"
        kept = "is saved" if event["saved"] else "was NOT saved"
        return f"stopped {when}{f', which {kept}' if self._world else ''}; {again}"

    def _degraded(self, event: Mapping[str, Any]) -> str:
        if event["tier"] == "local":
            self._saved = f"step {event['step']} is not in RAM"
        elif event["cause"] in self._causes:
            return ""
        else:
            self._causes.add(event["cause"])
        advice = storage_cause.advice(event["why"])
        return "{tier} tier, step {step}: {why}" + (f"; {advice}" if advice else "")
