"""The events of a run: their names and fields, for terminals and logs.

An event is a name in `NAMES` and a few JSON fields. Code reports events by calling an
`Emit`. A progress line, a log file and the supervisor's pipe each implement it.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from elastic_ckpt.core import storage


class Event(NamedTuple):
    """The fields of an event and its human-readable text.

    Attributes:
      fields: the field names.
      text: the line that `monitoring.progress` formats with the fields; empty if that
        module prints no line or composes its own.
      begins: the phase of the run that the event begins, if any. Progress, status, the
        phases of a recovery, and goodput are all based on these phases.
    """

    fields: tuple[str, ...]
    text: str = ""
    begins: str = ""


def _event(fields: str, text: str = "", *, begins: str = "") -> Event:
    return Event(tuple(fields.split()), text, begins)


# Every event of a run. Users see these names and fields in `events.jsonl`, so a golden
# file in the tests freezes them.
NAMES: dict[str, Event] = {
    "world_started": _event(
        "world slices spares",
        "world {world} starts on slices {slices}{spares:after , spare: }",
        begins="starting a world",
    ),
    "world_joined": _event("world", begins="searching for the newest step"),
    "world_claimed": _event("world step"),
    "world_leaving": _event(
        "slices",
        "leaving after the current step{slices:after , to continue on slices }",
        begins="leaving for other slices",
    ),
    "world_left": _event(
        "step",
        "left after step {step} to continue on other slices",
        begins="choosing slices",
    ),
    "recovered": _event(
        "world steps_lost secs end_secs decide_secs start_secs prepare_secs"
        " restore_secs compile_secs step_secs",
        "recovered in {secs:.1f} s ({end_secs:phase end}{decide_secs:phase decide}"
        "{start_secs:phase start}{prepare_secs:phase prepare}"
        "{restore_secs:phase restore}{compile_secs:phase compile}"
        "{step_secs:phase step}); {steps_lost:count step} to retrain",
        begins="training",
    ),
    "state_kept": _event(
        "step device_bytes secs",
        "kept step {step} in device memory: {device_bytes:bytes}",
    ),
    "leader_found": _event(
        "machine leader", "machine {machine}: machine {leader} leads the run"
    ),
    "leader_lost": _event(
        "machine why", "machine {machine}, which led the run, is lost: {why}"
    ),
    "verdict": _event(
        "world kind what which phase step since evidence action why",
        "verdict: {why} ({kind})",
    ),
    "slice_lost": _event(
        "slice why", "slice {slice} is lost: {why}", begins="choosing slices"
    ),
    "slice_preempted": _event("slice", "slice {slice} is being preempted (SIGTERM)"),
    "slice_returned": _event("slice", "slice {slice} is back"),
    "slice_refused": _event("slice why", "slice {slice} is refused: {why}"),
    "slice_quarantined": _event("slice why", "slice {slice} is quarantined: {why}"),
    "fault_injected": _event("kind target step", "injected {kind} {target}"),
    "slow_host": _event(
        "host slice phase why",
        "host {host} of slice {slice} is slow in phase {phase!r}: {why}",
    ),
    "scale_requested": _event(
        "slices chosen",
        "{slices:count slice} requested: the run moves to slices {chosen}",
    ),
    "waiting_for_slices": _event(
        "why within_secs",
        "waiting for slices, for up to {within_secs:.0f} s: {why}",
        begins="waiting for slices",
    ),
    "run_started": _event(
        "run hosts slices devices start_step steps",
        "{run}:{start_step:after  from step }{steps:after  to step } on"
        " {hosts:count host}, {slices:count slice}, {devices:count device}",
        begins="restoring",
    ),
    "batch_changed": _event(
        "step rows rows_before per_device_before",
        "global batch {rows_before} -> {rows} rows since step {step};"
        " set per_device_batch_size={per_device_before:g} to keep it",
    ),
    "step_interrupted": _event(
        "step path resume_step",
        "the save of step {step} was interrupted, so the step is skipped ({path});"
        " the newest complete step is {resume_step}",
    ),
    "compile_started": _event("step", "compiling for step {step}", begins="compiling"),
    "compiled": _event("step secs", begins="training"),
    "executable_loaded": _event(
        "step secs", "loaded the program for step {step}", begins="training"
    ),
    "executable_refused": _event(
        "path why", "{path} is rejected: {why}; compiling instead"
    ),
    "step": _event("step steps loss secs tokens learning_rate", begins="training"),
    "step_done": _event("step", begins="training"),
    "replicas_differ": _event(
        "step leaf hosts devices is_certain why", "step {step}: copies differ: {why}"
    ),
    "validated": _event("step level findings secs"),
    "step_preserved": _event("step why", "step {step} is preserved: {why}"),
    "save_started": _event("step"),
    "save_blocked": _event("step secs"),
    "saved": _event("step secs"),
    "replicated": _event("step copies bytes secs"),
    "backed_up": _event("step bytes secs world"),
    "degraded": _event("tier step cause why"),
    "storage_recovered": _event(
        "step cause steps secs", "storage accepts steps again, since step {step}"
    ),
    "step_passed_over": _event("step why", "skipped: {why}"),
    "went_back": _event("step to_step"),
    "component_not_loaded": _event("step component why", "{why}"),
    "weights_loaded": _event(
        "path bytes secs",
        "weights of {path}: {bytes:bytes}",
        begins="reading the first batch",
    ),
    "weights_skipped": _event(
        "path step", "init_from is ignored: the run has saved step {step}"
    ),
    "restored_from": _event(
        "step local_bytes close_bytes distant_bytes persistent_bytes bad_copies"
        " repaired",
        "restored step {step}: {local_bytes:bytes from this host's RAM}"
        "{close_bytes:bytes from close peers}{distant_bytes:bytes from distant peers}"
        "{persistent_bytes:bytes from persistent storage}"
        "{bad_copies:after ; bad copies: }{repaired:after , repaired: }",
        begins="reading the first batch",
    ),
    "restore_distrusted": _event(
        "step restored_step to_step why",
        "step {step}: {why}, soon after step {restored_step} was restored from RAM"
        "{to_step:after ; abandoning it and rolling back to step }",
    ),
    "evaluated": _event(
        "step loss batches secs",
        "step {step}: evaluated {batches:count batch}, loss {loss:.4f}",
    ),
    "divergence_found": _event(
        "step callback action why", "step {step}: {callback}: {why} ({action})"
    ),
    "rolled_back": _event(
        "step to_step rows rollbacks secs",
        "rolled back from step {step} to {to_step}, skipping {rows:count row};"
        " {rollbacks:count rollback} so far",
    ),
    "data_ended": _event(
        "step",
        "the data ended: step {step} is the last",
        begins="saving the last step",
    ),
    "run_finished": _event(
        "step secs", "finished at step {step} after {secs:.1f} s", begins="finished"
    ),
    "stop_requested": _event(
        "within_secs",
        "asked to stop: saving after the current step, within {within_secs:g} s",
        begins="saving before the end",
    ),
    "run_stopped": _event("step saved", begins="stopped"),
    "host_lost": _event(
        "host why", "host {host} is lost: {why}", begins="ending the world"
    ),
    "run_failed": _event("step why", begins="failed"),
}

# The phases of a run that has ended.
ENDS = ("finished", "stopped", "failed")


class Emit(Protocol):
    """A callable that receives events."""

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Receives the event named `name`, one of `NAMES`, with exactly its fields."""


def check(name: str, fields: dict[str, storage.Json]) -> None:
    """Asserts that `NAMES` has the event, with these fields."""
    assert name in NAMES, f"there is no event {name}; add it to events.NAMES"
    needed = NAMES[name].fields
    assert set(fields) == set(needed), (
        f"the event {name} needs the fields {needed}, but got {[*fields]}"
    )


def nobody(name: str, **fields: storage.Json) -> None:
    """An `Emit` that only checks the event."""
    check(name, fields)


class EventQueue:
    """A queue for events from any thread, which the flushing thread passes to `emit`.

    Args:
      emit: the function to call for each event.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._queue = queue.SimpleQueue[tuple[str, dict[str, storage.Json]]]()

    def put(self, name: str, **fields: storage.Json) -> None:
        """Adds an event; an `Emit`."""
        self._queue.put((name, fields))

    def flush(self) -> None:
        """Passes on all queued events."""
        while not self._queue.empty():
            name, fields = self._queue.get()
            self._emit(name, **fields)

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """Flushes when the block ends, even with an error."""
        try:
            yield
        finally:
            self.flush()


def counted(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log's records, without those that a launch wrote after it had been replaced.

    Args:
      records: the records in the order in which they were written. `claim`, the last
        world that a record's writer had claimed, is removed from each record.
    """
    newest = 0
    kept = []
    for record in records:
        claim = record.pop("claim", newest)
        if claim >= newest:
            newest = claim
            kept.append(record)
    return kept
