"""The events of a run: their names and fields, for terminals and logs.

An event is a name in `NAMES` and a few JSON fields. Code reports events by calling an
`Emit`. A progress line, a log file and the supervisor's pipe each implement it.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from elastic_ckpt.core import storage

# Every event of a run with the fields that it carries. Users see these names in
# `events.jsonl`, so a golden file in the tests freezes them.
NAMES: dict[str, tuple[str, ...]] = {
    "world_started": ("world", "slices", "spares"),
    "world_joined": ("world",),
    "world_claimed": ("world", "step"),
    "world_leaving": ("slices",),
    "world_left": ("step",),
    "recovered": (
        "world",
        "steps_lost",
        "secs",
        "end_secs",
        "decide_secs",
        "start_secs",
        "prepare_secs",
        "restore_secs",
        "compile_secs",
        "step_secs",
    ),
    "state_kept": ("step", "device_bytes", "secs"),
    "leader_found": ("machine", "leader"),
    "leader_lost": ("machine", "why"),
    "verdict": (
        "world",
        "kind",
        "what",
        "which",
        "phase",
        "step",
        "since",
        "evidence",
        "action",
        "why",
    ),
    "slice_lost": ("slice", "why"),
    "slice_preempted": ("slice",),
    "slice_returned": ("slice",),
    "slice_refused": ("slice", "why"),
    "slice_quarantined": ("slice", "why"),
    "fault_injected": ("kind", "target", "step"),
    "slow_host": ("host", "slice", "phase", "why"),
    "scale_requested": ("slices", "chosen"),
    "waiting_for_slices": ("why", "within_secs"),
    "run_started": ("run", "hosts", "slices", "devices", "start_step", "steps"),
    "batch_changed": ("step", "rows", "rows_before", "per_device_before"),
    "step_interrupted": ("step", "path", "resume_step"),
    "compile_started": ("step",),
    "compiled": ("step", "secs"),
    "executable_loaded": ("step", "secs"),
    "executable_refused": ("path", "why"),
    "step": ("step", "steps", "loss", "secs", "tokens", "learning_rate"),
    "step_done": ("step",),
    "replicas_differ": ("step", "leaf", "hosts", "devices", "is_certain", "why"),
    "validated": ("step", "level", "findings", "secs"),
    "step_preserved": ("step", "why"),
    "save_started": ("step",),
    "save_blocked": ("step", "secs"),
    "saved": ("step", "secs"),
    "replicated": ("step", "copies", "bytes", "secs"),
    "backed_up": ("step", "bytes", "secs", "world"),
    "degraded": ("tier", "step", "cause", "why"),
    "storage_recovered": ("step", "cause", "steps", "secs"),
    "step_passed_over": ("step", "why"),
    "went_back": ("step", "to_step"),
    "component_not_loaded": ("step", "component", "why"),
    "weights_loaded": ("path", "bytes", "secs"),
    "weights_skipped": ("path", "step"),
    "restored_from": (
        "step",
        "local_bytes",
        "close_bytes",
        "distant_bytes",
        "persistent_bytes",
        "bad_copies",
        "repaired",
    ),
    "restore_distrusted": ("step", "restored_step", "to_step", "why"),
    "evaluated": ("step", "loss", "batches", "secs"),
    "divergence_found": ("step", "callback", "action", "why"),
    "rolled_back": ("step", "to_step", "rows", "rollbacks", "secs"),
    "data_ended": ("step",),
    "run_finished": ("step", "secs"),
    "stop_requested": ("within_secs",),
    "run_stopped": ("step", "saved"),
    "host_lost": ("host", "why"),
    "run_failed": ("step", "why"),
}


class Emit(Protocol):
    """A callable that receives events."""

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Receives the event `name`, one of `NAMES`, with exactly its fields."""


def check(name: str, fields: dict[str, storage.Json]) -> None:
    """Asserts that `NAMES` has the event, with these fields."""
    assert name in NAMES, f"there is no event {name}; add it to events.NAMES"
    assert set(fields) == set(NAMES[name]), (
        f"the event {name} needs the fields {NAMES[name]}; it was given {[*fields]}"
    )


def nobody(name: str, **fields: storage.Json) -> None:
    """An `Emit` that only checks the event."""
    check(name, fields)


class EventQueue:
    """Events from any thread, which `emit` receives in the thread that flushes.

    Args:
      emit: called for each event.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._queue = queue.SimpleQueue[tuple[str, dict[str, storage.Json]]]()

    def put(self, name: str, **fields: storage.Json) -> None:
        """Adds an event; an `Emit`."""
        self._queue.put((name, fields))

    def flush(self) -> None:
        """Passes on the events that are there."""
        while not self._queue.empty():
            name, fields = self._queue.get()
            self._emit(name, **fields)

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """Flushes when the block ends, also after an error."""
        try:
            yield
        finally:
            self.flush()


def counted(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a log, without those of starts after another one replaced them.

    Args:
      records: in the order in which they were written; `claim`, the number of the world
        that their writer had claimed last, is taken out of them.
    """
    newest = 0
    kept = []
    for record in records:
        claim = record.pop("claim", newest)
        if claim >= newest:
            newest = claim
            kept.append(record)
    return kept
