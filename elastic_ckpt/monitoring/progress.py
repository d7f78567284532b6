"""Shows a run's events: one line that moves on a terminal, a few lines elsewhere.

`_TEXTS` has the line of each event, and the phase that begins with it. After some
seconds without an event the current phase is repeated, which distinguishes a run that
starts, compiles or saves from one that hangs.
"""

from __future__ import annotations

import collections
import re
import shutil
import string
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from elastic_ckpt.core import events, storage

_SILENCE_SECS = 4.5
# In a log, only a step that takes much longer than the others breaks the silence.
_SLOW_STEP_RATIO = 10

# The line of an event, and the phase that begins with it; each may be empty. `Progress`
# has a method for what is more than that.
_TEXTS: dict[str, tuple[str, str]] = {
    "world_joined": ("", "assembling the job and searching for the newest step"),
    "world_claimed": ("", ""),
    "world_left": ("left after step {step}, for other slices", "ending the world"),
    "slice_preempted": ("slice {slice} is asked to end (SIGTERM)", ""),
    "slice_refused": ("slice {slice} is not taken in: {why}", ""),
    "slice_quarantined": ("slice {slice} is not used again: {why}", ""),
    "fault_injected": ("injected {kind} {target}", ""),
    "slow_host": ("host {host} of slice {slice} is slow in phase {phase!r}: {why}", ""),
    "scale_requested": (
        "{slices:count slice} requested: the run is to be on slices {chosen}",
        "",
    ),
    "state_kept": ("kept step {step} in device memory: {device_bytes:bytes}", ""),
    "leader_lost": ("machine {machine}, which led the run, is lost: {why}", ""),
    "verdict": ("verdict: {why} ({kind})", ""),
    "slice_lost": ("slice {slice} is lost: {why}", "choosing slices"),
    "slice_returned": ("slice {slice} is back", ""),
    "waiting_for_slices": (
        "waiting for slices, for up to {within_secs:.0f} s: {why}",
        "waiting for slices",
    ),
    "batch_changed": (
        "global batch {rows_before} -> {rows} rows since step {step};"
        " per_device_batch_size={per_device_before:g} keeps it",
        "",
    ),
    "compile_started": ("compiling for step {step}", "compiling"),
    "compiled": ("", "step {step}"),
    "executable_loaded": ("loaded the program for step {step}", "step {step}"),
    "executable_refused": ("{path} is refused: {why}; compiling instead", ""),
    "compiled_ahead": ("compiled ahead for {hosts:count host}", ""),
    "compile_ahead_failed": ("not compiled ahead for {hosts:count host}: {why}", ""),
    "step_interrupted": (
        "step {step} was interrupted while it was saved and is passed over ({path});"
        " the newest complete step is {resume_step}",
        "",
    ),
    "host_lost": ("host {host} is lost: {why}", "ending the world"),
    "weights_loaded": ("weights of {path}: {bytes:bytes}", ""),
    "weights_skipped": ("init_from is not read: the run has saved step {step}", ""),
    "step_passed_over": ("passed over: {why}", ""),
    "replicated": ("", ""),
    "save_started": ("", ""),
    "saved": ("", ""),
    "backed_up": ("", ""),
    "storage_recovered": ("storage takes steps again, since step {step}", ""),
    "stop_requested": (
        "asked to end: saving after the step under way, within {within_secs:g} s",
        "saving before the end",
    ),
    "replicas_differ": ("step {step}: copies differ: {why}", ""),
    "step_preserved": ("step {step} is preserved: {why}", ""),
    "validated": ("", ""),
    "save_blocked": ("", ""),
    "evaluated": (
        "step {step}: evaluated {batches:count batch}, loss {loss:.4f}",
        "",
    ),
    "divergence_found": ("step {step}: {callback}: {why} ({action})", ""),
    # `rolled_back` tells more.
    "went_back": ("", ""),
    "component_not_loaded": ("{why}", ""),
    "rolled_back": (
        "went back from step {step} to {to_step}, and left out {rows:count row};"
        " {rollbacks:count rollback} so far",
        "",
    ),
    "run_finished": ("step {step} is done, after {secs:.1f} s", ""),
}
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
        self._is_stopping = self._is_storage_full = False
        self._world = ""
        self._steps = 0
        self._saved = ""
        self._is_anything_saved = self._has_begun = False
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
                self._stream.write("\n")
                self._stream.flush()
                self._moving = False

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows one event."""
        events.check(name, fields)
        special = getattr(self, f"_on_{name}", None)
        with self._lock:
            if name in _SAVES:
                self._saved = _formatted(_SAVES[name], **fields)
                self._is_anything_saved |= name != "save_started"
            self._is_stopping |= name == "stop_requested"
            self._is_storage_full &= name != "storage_recovered"
            if special is not None:
                special(**fields)
                return
            line, phase = (_formatted(text, **fields) for text in _TEXTS[name])
            if line:
                self._line(line)
            if phase:
                self._begin(phase)

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

    def _begin(self, phase: str) -> None:
        # Begins a phase that is not a step.
        self._phase, self._phase_secs = phase, self._clock()
        self._recent_secs.clear()
        self._done_secs = None

    def _on_world_started(
        self, *, world: int, slices: list[int], spares: list[int]
    ) -> None:
        if world > 1:
            more = _formatted(", spare: {spares}", spares=spares) if spares else ""
            text = "world {world} starts on slices {slices}{more}"
            self._line(_formatted(text, world=world, slices=slices, more=more))
            self._begin(f"starting world {world}")

    def _on_world_leaving(self, *, slices: list[int]) -> None:
        on = _formatted(", to continue on slices {slices}", slices=slices)
        self._line(f"leaving after the step under way{on if slices else ''}")

    def _on_recovered(self, **event: Any) -> None:
        phases = ", ".join(
            f"{name.removesuffix('_secs')} {secs:.1f}"
            for name, secs in event.items()
            if name.endswith("_secs") and secs >= 0.05
        )
        text = "went on after {secs:.1f} s ({phases}); {steps_lost:count step} to train"
        self._line(_formatted(f"{text} again", phases=phases, **event))

    def _on_leader_found(self, *, machine: int, leader: int) -> None:
        leads = machine == leader
        what = "leads the run" if leads else f"follows machine {leader}"
        self._line(f"machine {machine} {what}")
        # The leader shows the phases of the run.
        self._begin("waiting for machines" if leads else "")

    def _on_run_started(self, **event: Any) -> None:
        world = "{hosts:count host}, {slices:count slice}, {devices:count device}"
        self._world = _formatted(world, **event)
        self._steps, start = event["steps"], event["start_step"]
        self._has_begun = True
        self._is_anything_saved |= start > 0
        since = f"from step {start} " if start else ""
        until = "" if self._steps is None else f"to step {self._steps} "
        self._line(f"{event['run']}: {since}{until}on {self._world}")
        self._begin(f"restoring step {start}" if start else "initializing the state")

    def _on_run_failed(self, *, step: int, why: str) -> None:
        del why  # it ends the output of the command
        when = f"after step {step}" if self._has_begun else "before it began"
        self._line(f"the run failed {when}; once its cause is removed, {self._next()}")

    def _on_run_stopped(self, *, step: int, saved: bool) -> None:
        self._is_anything_saved |= saved
        kept = "which is saved" if saved else "which was NOT saved"
        when = f"after step {step}, {kept}" if self._has_begun else "before it began"
        self._line(f"stopped {when}; {self._next()}")

    def _next(self) -> str:
        if self._is_anything_saved:
            return "the same command continues it from the newest complete step"
        if not self._has_begun:
            return "the same command starts it"
        return "the same command starts it at step 0, for nothing was saved"

    def _on_restored_from(self, *, step: int, **event: int) -> None:
        parts = [
            f"{_bytes(event[f'{near}_bytes'])} {source}"
            for near, source in _NEARNESS.items()
            if event[f"{near}_bytes"]
        ]
        bad = ""
        if event["bad_copies"]:
            bad = f"; {event['repaired']} of {event['bad_copies']} bad copies put right"
        self._line(f"restored step {step}: {', '.join(parts) or 'data'}{bad}")
        self._begin("reading the first batch")

    def _on_degraded(self, *, tier: str, step: int, cause: str, why: str) -> None:
        if self._saved == f"saving step {step}" and tier == "local":
            self._saved = f"step {step} is not in RAM"
        if (tier, cause) != ("persistent", "full"):
            self._line(f"{tier} tier, step {step}: {why}")
        elif not self._is_storage_full:
            self._is_storage_full = True
            path = re.search(r"(\w+:/)?/\S*?(?=/\d+[./]|\s|$)", why)
            self._line(
                f"storage full since step {step}{f': {path[0]}' if path else ''};"
                " retried automatically; make room, or keep fewer steps"
                " (max_num_checkpoints_to_keep)"
            )

    def _on_step(
        self,
        *,
        step: int,
        steps: int | None,
        loss: float | None,
        secs: float,
        **_: Any,
    ) -> None:
        self._recent_secs.append(secs)
        # A loop of the user's own may not know them.
        of_all = "" if steps is None else f"/{steps}"
        loss_shown = "" if loss is None else f" | loss {loss:.4f}"
        done = f"step {step}{of_all}{loss_shown} | {{rate}} | {self._world}"
        self._step(done, step, is_last=step == steps, of_all=of_all)
        if step == steps:
            self._begin(f"step {step} is done and is being saved")

    def _on_step_done(self, *, step: int) -> None:
        # Of a loop that reports no more than that.
        now_secs = self._clock()
        if self._done_secs is not None:
            self._recent_secs.append(now_secs - self._done_secs)
        self._done_secs = now_secs
        self._step(f"step {step} | {{rate}}", step)

    def _step(
        self, text: str, step: int, *, is_last: bool = False, of_all: str = ""
    ) -> None:
        total_secs = max(sum(self._recent_secs), 1e-9)
        text = text.format(rate=f"{len(self._recent_secs) / total_secs:.1f} steps/s")
        saved = f" | {self._saved}" if self._saved else ""
        self._phase_secs = self._shown_secs = self._clock()
        is_logged = step % self._log_period == 0 or is_last
        self._show(f"{text}{saved}", is_logged=is_logged)
        if not self._is_stopping:
            self._phase = f"step {step + 1}{of_all}"

    def _on_restore_distrusted(
        self, *, step: int, restored_step: int, to_step: int | None, why: str
    ) -> None:
        outcome = "storage has no step before it to go back to"
        if to_step is not None:
            outcome = (
                f"it is abandoned, and the run goes back to step {to_step} in storage,"
                " to the same rows"
            )
        self._line(
            f"step {step}: {why}, soon after step {restored_step} was restored from"
            f" RAM; {outcome}"
        )

    def _on_data_ended(self, *, step: int) -> None:
        of_all = f" of {self._steps}" if self._steps else ""
        self._line(f"the data ended after step {step}{of_all}, the last of the run")
        self._begin(f"step {step} is the last and is being saved")

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


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
