"""The metrics of a run as a whole, derived from its events.

The process that keeps the journal records them. It outlives worlds, so each series goes
on when slices are lost or return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.core import events, metrics, storage
from elastic_ckpt.monitoring import goodput


class RunMetrics:
    """An `Emit` that passes events on and records the metrics of the run.

    Args:
      emit: called for each event, before its metrics are recorded.
      newest_step: the steps that earlier starts of the run have done.
      clock: the time in seconds.
    """

    def __init__(
        self,
        emit: events.Emit,
        *,
        newest_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._account = goodput.Account(time=clock(), newest_step=newest_step)
        self._missing: frozenset[int] = frozenset()

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Passes an event on."""
        self._emit(name, **fields)
        before = self._account.secs
        self._account = goodput.after(self._account, name, fields, time=self._clock())
        if name == "step":
            _record_step(fields)
        self._record_slices(name, fields)
        if self._account.secs is not before:
            for cause, secs in self._account.secs.items():
                if secs > before[cause]:
                    metrics.GOODPUT_SECS[cause].record(secs - before[cause])
            metrics.GOODPUT.record(self._account.percent)
        metric, field = _OF_EVENTS.get(name, (None, None))
        value = 1 if field is None else fields[field]
        if metric is not None and value is not None:
            metric.record(float(str(value)))

    def _record_slices(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "run_started":
            metrics.SLICES.record(fields["slices"])
        elif name == "world_started":
            metrics.SLICES.record(len(fields["slices"]))
            self._missing -= {*fields["slices"], *fields["spares"]}
        elif name == "slice_returned":
            self._missing -= {fields["slice"]}
        elif name in _MISSING:
            self._missing |= {fields["slice"]}
        else:
            return
        metrics.MISSING_SLICES.record(len(self._missing))


# What an event records: one of its fields, or that it happened.
_OF_EVENTS: dict[str, tuple[metrics.Metric, str | None]] = {
    "run_started": (metrics.TRAIN_PLANNED, "steps"),
    "world_claimed": (metrics.TRAIN_CLAIM, "world"),
    "saved": (metrics.SAVED_STEPS, "step"),
    "backed_up": (metrics.STORED_STEPS, "step"),
    "recovered": (metrics.LOST_STEPS, "steps_lost"),
    "host_lost": (metrics.LOST_HOSTS, None),
    "slice_lost": (metrics.LOST_SLICES, None),
    "divergence_found": (metrics.FINDINGS, None),
    "rolled_back": (metrics.ROLLBACKS, None),
    "run_failed": (metrics.FAILURES, None),
}
# Events after which a slice is not used until it returns.
_MISSING = ("slice_lost", "slice_preempted", "slice_refused", "slice_quarantined")
_OF_STEPS = {
    "step": metrics.TRAIN_STEPS,
    "loss": metrics.TRAIN_LOSS,
    "secs": metrics.TRAIN_STEP,
    "tokens": metrics.TRAIN_TOKENS,
    "learning_rate": metrics.TRAIN_LEARNING_RATE,
}


def _record_step(fields: Mapping[str, Any]) -> None:
    # A loop of the user's own may not report them all.
    for name, metric in _OF_STEPS.items():
        if fields.get(name) is not None:
            metric.record(float(fields[name]))
    secs, tokens = fields["secs"], fields.get("tokens")
    if secs > 0:
        metrics.TRAIN_STEP_RATE.record(1 / secs)
        if tokens is not None:
            metrics.TRAIN_TOKEN_RATE.record(tokens / secs)
