"""Shows a run's events: one line that moves on a terminal, a few lines elsewhere.

`core.events` has the line of each event and the phase that begins with it; `_LINES` has
those that take more than their fields. After some seconds without an event the current
phase is repeated, which distinguishes a run that starts, compiles or saves from one
that hangs.
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

from elastic_ckpt.core import events, storage, storage_cause

_SILENCE_SECS = 4.5
# In a log, only a step that takes much longer than the others breaks the silence.
_SLOW_STEP_RATIO = 10
# What the line of a step says of saves from then on.
_SAVES = {
    "save_started": "saving step {step}",
    "saved": "saved step {step}",
    "backed_up": "backed up step {step}",
    "restored_from": "saved step {step}",
}
_NEARNESS = {
    "local": "from this host's RAM",
    "close": "from close peers",
    "distant": "from distant peers",
    "persistent": "from persistent storage",
}


class _Words(string.Formatter):
    # `{n:count host}` is "1 host" or "2 hosts", `{n:bytes}` is "3 MiB", and lists are
    # separated by commas.

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "bytes":
            return _bytes(value)
        kind, _, noun = format_spec.partition(" ")
        if kind == "count":
            plural = "es" if noun.endswith("ch") else "s"
            return f"{value} {noun}" + plural * (value != 1)
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return super().format_field(value, format_spec)


_formatted = _Words().format


class Progress:
    """An `Emit` for people; while it is open, a thread breaks long silences.

    Args:
      log_period: steps between two lines where `stream` is not a terminal.
      stream: where to write; None is standard output as it is now.
      clock: the time in seconds.
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
        self._has_begun = self._is_anything_saved = self._is_stopping = False
        # Why storage takes no steps, as far as it was shown.
        self._causes: set[str] = set()
        self._recent_secs: collections.deque[float] = collections.deque(maxlen=10)
        # When the last step of a loop was done that reports no more than that.
        self._done_secs: float | None = None
        # The current phase and its begin; the time of the last output or step.
        self._phase = "starting"
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
        """Ends the thread and the moving line."""
        with self._lock:
            self._closed.set()
            if self._moving:
                self._write("\n", moving=False)

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows one event."""
        events.check(name, fields)
        with self._lock:
            if name in _SAVES:
                self._saved = _formatted(_SAVES[name], **fields)
                self._is_anything_saved |= name != "save_started"
            self._is_stopping |= name == "stop_requested"
            if name in ("step", "step_done"):
                self._step(fields)
                return
            event = events.NAMES[name]
            line_of = _LINES.get(name)
            line = line_of(self, fields) if line_of else event.text
            if line:
                self._line(_formatted(line, **fields))
            if name == "leader_found":
                # The leader shows the phases of the run.
                is_leader = fields["machine"] == fields["leader"]
                self._phase = "waiting for machines" if is_leader else ""
            elif event.begins and name != "recovered":
                self._phase = "" if event.begins in events.ENDS else event.begins
                self._phase_secs = self._clock()
                self._recent_secs.clear()
                self._done_secs = None

    def remind(self) -> None:
        """Shows the current phase if nothing has been shown for a while."""
        with self._lock:
            silence_secs = _SILENCE_SECS
            if self._recent_secs and not self._is_terminal:
                mean_secs = sum(self._recent_secs) / len(self._recent_secs)
                silence_secs = max(silence_secs, _SLOW_STEP_RATIO * mean_secs)
            now_secs = self._clock()
            is_silent = now_secs - self._shown_secs >= silence_secs
            if self._phase and is_silent and not self._closed.is_set():
                secs = now_secs - self._phase_secs
                self._show(f"{self._phase}, for {secs:.0f} s now", is_logged=True)

    def _break_silences(self) -> None:
        while not self._closed.wait(0.25):
            self.remind()

    def _step(self, event: Mapping[str, Any]) -> None:
        # A loop of the user's own may report no more than that a step is done.
        step, steps, now_secs = event["step"], event.get("steps"), self._clock()
        if "secs" in event:
            self._recent_secs.append(event["secs"])
        else:
            if self._done_secs is not None:
                self._recent_secs.append(now_secs - self._done_secs)
            self._done_secs = now_secs
        of_all = "" if steps is None else f"/{steps}"
        loss = event.get("loss")
        rate = len(self._recent_secs) / max(sum(self._recent_secs), 1e-9)
        parts = (
            f"step {step}{of_all}",
            "" if loss is None else f"loss {loss:.4f}",
            f"{rate:.1f} steps/s",
            self._world,
            self._saved,
        )
        self._phase_secs = self._shown_secs = now_secs
        is_logged = step % self._log_period == 0 or step == steps
        self._show(" | ".join(filter(None, parts)), is_logged=is_logged)
        if step == steps:
            self._phase = f"step {step} is done and is being saved"
        elif not self._is_stopping:
            self._phase = f"step {step + 1}{of_all}"

    def _line(self, text: str) -> None:
        self._write(f"\n{text}\n" if self._moving else f"{text}\n", moving=False)

    def _show(self, text: str, *, is_logged: bool) -> None:
        # Moves on a terminal, and is a line elsewhere.
        if self._is_terminal:
            # A line that wraps could not be written over.
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\033[K{text[:width]}", moving=True)
        elif is_logged:
            self._line(text)

    def _write(self, text: str, *, moving: bool) -> None:
        self._stream.write(text)
        self._moving = moving
        self._stream.flush()
        self._shown_secs = self._clock()

    def _run_started(self, event: Mapping[str, Any]) -> str:
        self._world = _formatted(
            "{hosts:count host}, {slices:count slice}, {devices:count device}", **event
        )
        self._has_begun = True
        self._is_anything_saved |= event["start_step"] > 0
        since = "from step {start_step} " if event["start_step"] else ""
        until = "" if event["steps"] is None else "to step {steps} "
        return f"{{run}}: {since}{until}on {self._world}"

    def _ended(self, event: Mapping[str, Any]) -> str:
        self._is_anything_saved |= event.get("saved", False)
        again = "starts it at step 0, for nothing was saved"
        if self._is_anything_saved:
            again = "continues it from the newest complete step"
        elif not self._has_begun:
            again = "starts it"
        when = "after step {step}" if self._has_begun else "before it began"
        if "saved" not in event:
            # Why it failed ends the output of the command.
            cause = "once its cause is removed"
            return f"the run failed {when}; {cause}, the same command {again}"
        kept = "which is saved" if event["saved"] else "which was NOT saved"
        when += f", {kept}" if self._has_begun else ""
        return f"stopped {when}; the same command {again}"

    def _degraded(self, event: Mapping[str, Any]) -> str:
        tier, cause = event["tier"], event["cause"]
        if self._saved == f"saving step {event['step']}" and tier == "local":
            self._saved = f"step {event['step']} is not in RAM"
        is_known = cause in self._causes
        if tier == "persistent":
            self._causes.add(cause)
        advice = storage_cause.advice(event["why"])
        text = "{tier} tier, step {step}: {why}" + (f"; {advice}" if advice else "")
        return "" if is_known and tier == "persistent" else text

    def _storage_recovered(self, event: Mapping[str, Any]) -> str:
        del event
        self._causes.clear()
        return events.NAMES["storage_recovered"].text


def _world_started(_: Progress, event: Mapping[str, Any]) -> str:
    spares = ", spare: {spares}" if event["spares"] else ""
    return f"world {{world}} starts on slices {{slices}}{spares}"


def _world_leaving(_: Progress, event: Mapping[str, Any]) -> str:
    on = ", to continue on slices {slices}" if event["slices"] else ""
    return f"leaving after the step under way{on}"


def _leader_found(_: Progress, event: Mapping[str, Any]) -> str:
    leads = event["machine"] == event["leader"]
    what = "leads the run" if leads else "follows machine {leader}"
    return f"machine {{machine}} {what}"


def _recovered(_: Progress, event: Mapping[str, Any]) -> str:
    phases = ", ".join(
        f"{name.removesuffix('_secs')} {secs:.1f}"
        for name, secs in event.items()
        if name.endswith("_secs") and secs >= 0.05
    )
    again = "{steps_lost:count step} to train again"
    return f"went on after {{secs:.1f}} s ({phases}); {again}"


def _restored(_: Progress, event: Mapping[str, Any]) -> str:
    parts = [
        f"{{{near}_bytes:bytes}} {source}"
        for near, source in _NEARNESS.items()
        if event[f"{near}_bytes"]
    ]
    bad = "; {repaired} of {bad_copies} bad copies put right"
    of_them = bad if event["bad_copies"] else ""
    return f"restored step {{step}}: {', '.join(parts) or 'data'}{of_them}"


def _distrusted(_: Progress, event: Mapping[str, Any]) -> str:
    outcome = "storage has no step before it to go back to"
    if event["to_step"] is not None:
        outcome = "it is abandoned; the run goes back to step {to_step} in storage"
    return (
        "step {step}: {why}, soon after step {restored_step} was restored from RAM;"
        f" {outcome}"
    )


# The lines of events that take more than their fields.
_LINES: dict[str, Callable[[Progress, Mapping[str, Any]], str]] = {
    "world_started": _world_started,
    "world_leaving": _world_leaving,
    "leader_found": _leader_found,
    "recovered": _recovered,
    "run_started": Progress._run_started,
    "run_failed": Progress._ended,
    "run_stopped": Progress._ended,
    "restored_from": _restored,
    "restore_distrusted": _distrusted,
    "degraded": Progress._degraded,
    "storage_recovered": Progress._storage_recovered,
}


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
