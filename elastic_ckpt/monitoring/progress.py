"""Shows a run's events: one line that moves on a terminal, a few lines elsewhere.

After some seconds without an event it repeats the current phase, which distinguishes a
run that starts, compiles or saves from one that hangs.
"""

from __future__ import annotations

import collections
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from elastic_ckpt.core import events, storage, storage_cause

_SILENCE_SECS = 4.5
# In a log, only a step that takes much longer than the others breaks the silence.
_SLOW_STEP_RATIO = 10


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
        with self._lock:
            getattr(self, f"_on_{name}")(**fields)

    def remind(self) -> None:
        """Shows the current phase if nothing has been shown for a while."""
        with self._lock:
            if not self._phase:
                return
            silence_secs = _SILENCE_SECS
            if self._recent_secs and not self._is_terminal:
                mean_secs = sum(self._recent_secs) / len(self._recent_secs)
                silence_secs = max(silence_secs, _SLOW_STEP_RATIO * mean_secs)
            if self._closed.is_set() or self._clock() - self._shown_secs < silence_secs:
                return
            secs = self._clock() - self._phase_secs
            text = f"{self._phase}, for {secs:.0f} s now"
            if self._is_terminal:
                self._move(text)
            else:
                self._line(text)

    def _break_silences(self) -> None:
        while not self._closed.wait(0.25):
            self.remind()

    def _begin(self, phase: str) -> None:
        # Begins a phase that is not a step.
        self._phase, self._phase_secs = phase, self._clock()
        self._recent_secs.clear()
        self._done_secs = None

    def _on_world_started(self, **event: Any) -> None:
        if event["world"] > 1:
            spares = _numbers(event["spares"], ", spare: {}")
            self._line(
                f"world {event['world']} starts on slices"
                f" {_numbers(event['slices'])}{spares}"
            )
            self._begin(f"starting world {event['world']}")

    def _on_world_joined(self, **_: Any) -> None:
        self._begin("assembling the job and searching for the newest step")

    def _on_world_claimed(self, **_: Any) -> None:
        pass

    def _on_recovered(self, **event: Any) -> None:
        phases = ", ".join(
            f"{name.removesuffix('_secs')} {secs:.1f}"
            for name, secs in event.items()
            if name.endswith("_secs") and secs >= 0.05
        )
        self._line(
            f"went on after {event['secs']:.1f} s ({phases});"
            f" {_count(event['steps_lost'], 'step')} to train again"
        )

    def _on_world_left(self, **event: Any) -> None:
        self._line(f"left after step {event['step']}, for other slices")
        self._begin("ending the world")

    def _on_world_leaving(self, **event: Any) -> None:
        on = _numbers(event["slices"], ", to continue on slices {}")
        self._line(f"leaving after the step under way{on}")

    def _on_slice_preempted(self, **event: Any) -> None:
        self._line(f"slice {event['slice']} is asked to end (SIGTERM)")

    def _on_slice_refused(self, **event: Any) -> None:
        self._line(f"slice {event['slice']} is not taken in: {event['why']}")

    def _on_slice_quarantined(self, **event: Any) -> None:
        self._line(f"slice {event['slice']} is not used again: {event['why']}")

    def _on_fault_injected(self, **event: Any) -> None:
        self._line(f"injected {event['kind']} {event['target']}")

    def _on_slow_host(self, **event: Any) -> None:
        self._line(
            f"host {event['host']} of slice {event['slice']} is slow in phase"
            f" {event['phase']!r}: {event['why']}"
        )

    def _on_scale_requested(self, **event: Any) -> None:
        self._line(
            f"{_count(event['slices'], 'slice')} requested: the run is to be on slices"
            f" {_numbers(event['chosen'])}"
        )

    def _on_state_kept(self, **event: Any) -> None:
        self._line(
            f"kept step {event['step']} in device memory:"
            f" {_bytes(event['device_bytes'])}"
        )

    def _on_leader_found(self, *, machine: int, leader: int) -> None:
        if machine == leader:
            self._line(f"machine {machine} leads the run")
            self._begin("waiting for machines")
        else:
            self._line(f"machine {machine} follows machine {leader}")
            # The leader shows the phases of the run.
            self._begin("")

    def _on_leader_lost(self, *, machine: int, why: str) -> None:
        self._line(f"machine {machine}, which led the run, is lost: {why}")

    def _on_verdict(self, **event: Any) -> None:
        self._line(f"verdict: {event['why']} ({event['kind']})")

    def _on_slice_lost(self, **event: Any) -> None:
        self._line(f"slice {event['slice']} is lost: {event['why']}")
        self._begin("choosing slices")

    def _on_slice_returned(self, **event: Any) -> None:
        self._line(f"slice {event['slice']} is back")

    def _on_waiting_for_slices(self, **event: Any) -> None:
        secs = event["within_secs"]
        self._line(f"waiting for slices, for up to {secs:.0f} s: {event['why']}")
        self._begin("waiting for slices")

    def _on_run_started(self, **event: Any) -> None:
        self._world = (
            f"{_count(event['hosts'], 'host')}, {_count(event['slices'], 'slice')},"
            f" {_count(event['devices'], 'device')}"
        )
        self._steps = event["steps"]
        start = event["start_step"]
        self._has_begun = True
        self._is_anything_saved |= start > 0
        since = f"from step {start} " if start else ""
        until = "" if self._steps is None else f"to step {self._steps} "
        self._line(f"{event['run']}: {since}{until}on {self._world}")
        self._begin(f"restoring step {start}" if start else "initializing the state")

    def _on_batch_changed(self, **event: Any) -> None:
        self._line(
            f"global batch {event['rows_before']} -> {event['rows']} rows since step"
            f" {event['step']}; per_device_batch_size={event['per_device_before']:g}"
            " keeps it"
        )

    def _on_compile_started(self, **event: Any) -> None:
        self._line(f"compiling for step {event['step']}")
        self._begin("compiling")

    def _on_compiled(self, **event: Any) -> None:
        self._begin(f"step {event['step']}")

    def _on_executable_loaded(self, **event: Any) -> None:
        self._line(f"loaded the program for step {event['step']}")
        self._begin(f"step {event['step']}")

    def _on_executable_refused(self, **event: Any) -> None:
        self._line(f"{event['path']} is refused: {event['why']}; compiling instead")

    def _on_compiled_ahead(self, **event: Any) -> None:
        self._line(f"compiled ahead for {_count(event['hosts'], 'host')}")

    def _on_compile_ahead_failed(self, **event: Any) -> None:
        hosts = _count(event["hosts"], "host")
        self._line(f"not compiled ahead for {hosts}: {event['why']}")

    def _on_step_interrupted(self, **event: Any) -> None:
        self._line(
            f"step {event['step']} was interrupted while it was saved and is passed"
            f" over ({event['path']}); the newest complete step is"
            f" {event['resume_step']}"
        )

    def _on_host_lost(self, **event: Any) -> None:
        self._line(f"host {event['host']} is lost: {event['why']}")
        self._begin("ending the world")

    def _on_run_failed(self, **event: Any) -> None:
        when = f"after step {event['step']}" if self._has_begun else "before it began"
        self._line(f"the run failed {when}; once its cause is removed, {self._next()}")

    def _on_stop_requested(self, **event: Any) -> None:
        self._line(
            "asked to end: saving after the step under way, within"
            f" {event['within_secs']:g} s"
        )
        self._begin("saving before the end")
        self._is_stopping = True

    def _on_run_stopped(self, **event: Any) -> None:
        if event["saved"]:
            self._note_saved(f"saved step {event['step']}")
        kept = "which is saved" if event["saved"] else "which was NOT saved"
        self._line(f"stopped after step {event['step']}, {kept}; {self._next()}")

    def _save_shown(self) -> str:
        # MaxText's own checkpoints are no events.
        return f" | {self._saved}" if self._saved else ""

    def _note_saved(self, saved: str) -> None:
        self._saved, self._is_anything_saved = saved, True

    def _next(self) -> str:
        if self._is_anything_saved:
            return "the same command continues it from the newest complete step"
        if not self._has_begun:
            return "the same command starts it"
        return "the same command starts it at step 0, for nothing was saved"

    def _on_restored_from(self, **event: Any) -> None:
        self._note_saved(f"saved step {event['step']}")
        parts = [
            f"{_bytes(event[f'{near}_bytes'])} {source}"
            for near, source in _NEARNESS.items()
            if event[f"{near}_bytes"]
        ]
        bad = ""
        if event["bad_copies"]:
            bad = f"; {event['repaired']} of {event['bad_copies']} bad copies put right"
        self._line(f"restored step {event['step']}: {', '.join(parts) or 'data'}{bad}")
        self._begin("reading the first batch")

    def _on_weights_loaded(self, **event: Any) -> None:
        step = event["step"]
        since = f"; the run goes on from its step {step}" if step else ""
        self._line(f"weights of {event['path']}: {_bytes(event['bytes'])}{since}")

    def _on_weights_skipped(self, **event: Any) -> None:
        self._line(f"init_from is not read: the run has saved step {event['step']}")

    def _on_step_passed_over(self, **event: Any) -> None:
        self._line(f"passed over: {event['why']}")

    def _on_degraded(self, **event: Any) -> None:
        if self._saved == f"saving step {event['step']}" and event["tier"] == "local":
            self._saved = f"step {event['step']} is not in RAM"
        if (event["tier"], event["cause"]) != ("persistent", storage_cause.FULL.name):
            self._line(f"{event['tier']} tier, step {event['step']}: {event['why']}")
        elif not self._is_storage_full:
            self._is_storage_full = True
            path = re.search(r"(\w+:/)?/\S*?(?=/\d+[./]|\s|$)", event["why"])
            where = f": {path[0]}" if path else ""
            self._line(
                f"storage full since step {event['step']}{where}; retried"
                " automatically; make room, or keep fewer steps"
                " (max_num_checkpoints_to_keep)"
            )

    def _on_storage_recovered(self, **event: Any) -> None:
        self._is_storage_full = False
        self._line(f"storage takes steps again, since step {event['step']}")

    def _on_replicated(self, **event: Any) -> None:
        pass

    def _on_backed_up(self, **event: Any) -> None:
        self._note_saved(f"backed up step {event['step']}")

    def _on_step(self, **event: Any) -> None:
        step, steps = event["step"], event["steps"]
        # A loop of the user's own may not know them.
        of_steps = "" if steps is None else f"/{steps}"
        loss = "" if event["loss"] is None else f" | loss {event['loss']:.4f}"
        self._recent_secs.append(event["secs"])
        rate = len(self._recent_secs) / max(sum(self._recent_secs), 1e-9)
        text = (
            f"step {step}{of_steps}{loss} | {rate:.1f} steps/s"
            f" | {self._world}{self._save_shown()}"
        )
        self._phase_secs = self._shown_secs = self._clock()
        if self._is_terminal:
            self._move(text)
        elif step % self._log_period == 0 or step == steps:
            self._line(text)
        if not self._is_stopping:
            self._phase = f"step {step + 1}{of_steps}"
        if step == steps:
            self._begin(f"step {step} is done and is being saved")

    def _on_step_done(self, **event: Any) -> None:
        # Of a loop that reports no more than that.
        step, now_secs = event["step"], self._clock()
        if self._done_secs is not None:
            self._recent_secs.append(now_secs - self._done_secs)
        self._done_secs = self._phase_secs = self._shown_secs = now_secs
        total_secs = max(sum(self._recent_secs), 1e-9)
        rate = len(self._recent_secs) / total_secs if self._recent_secs else 0.0
        text = f"step {step} | {rate:.1f} steps/s{self._save_shown()}"
        if self._is_terminal:
            self._move(text)
        elif step % self._log_period == 0:
            self._line(text)
        if not self._is_stopping:
            self._phase = f"step {step + 1}"

    def _on_replicas_differ(self, **event: Any) -> None:
        self._line(f"step {event['step']}: copies differ: {event['why']}")

    def _on_step_preserved(self, **event: Any) -> None:
        self._line(f"step {event['step']} is preserved: {event['why']}")

    def _on_validated(self, **event: Any) -> None:
        pass

    def _on_save_started(self, **event: Any) -> None:
        self._saved = f"saving step {event['step']}"

    def _on_save_blocked(self, **event: Any) -> None:
        pass

    def _on_saved(self, **event: Any) -> None:
        self._note_saved(f"saved step {event['step']}")

    def _on_evaluated(self, **event: Any) -> None:
        batches = _count(event["batches"], "batch", "es")
        self._line(
            f"step {event['step']}: evaluated {batches}, loss {event['loss']:.4f}"
        )

    def _on_divergence_found(self, **event: Any) -> None:
        self._line(
            f"step {event['step']}: {event['callback']}: {event['why']}"
            f" ({event['action']})"
        )

    def _on_went_back(self, **event: Any) -> None:
        """Shows nothing: `rolled_back` tells more."""

    def _on_component_not_loaded(self, **event: Any) -> None:
        self._line(event["why"])

    def _on_rolled_back(self, **event: Any) -> None:
        self._line(
            f"went back from step {event['step']} to {event['to_step']}, and left out"
            f" {_count(event['rows'], 'row')}; {_count(event['rollbacks'], 'rollback')}"
            " so far"
        )

    def _on_restore_distrusted(self, **event: Any) -> None:
        outcome = "storage has no step before it to go back to"
        if event["to_step"] is not None:
            outcome = (
                f"it is abandoned, and the run goes back to step {event['to_step']} in"
                " storage, to the same rows"
            )
        self._line(
            f"step {event['step']}: {event['why']}, soon after step"
            f" {event['restored_step']} was restored from RAM; {outcome}"
        )

    def _on_data_ended(self, **event: Any) -> None:
        of_all = f" of {self._steps}" if self._steps else ""
        self._line(
            f"the data ended after step {event['step']}{of_all}, the last of the run"
        )
        self._begin(f"step {event['step']} is the last and is being saved")

    def _on_run_finished(self, **event: Any) -> None:
        self._line(f"step {event['step']} is done, after {event['secs']:.1f} s")

    def _line(self, text: str) -> None:
        self._stream.write(f"\n{text}\n" if self._moving else f"{text}\n")
        self._moving = False
        self._stream.flush()
        self._shown_secs = self._clock()

    def _move(self, text: str) -> None:
        # A line that wraps could not be written over.
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\033[K{text[:width]}")
        self._moving = True
        self._stream.flush()
        self._shown_secs = self._clock()


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


def _numbers(numbers: Sequence[int], text: str = "{}") -> str:
    return text.format(", ".join(map(str, numbers))) if numbers else ""


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + plural * (number != 1)
