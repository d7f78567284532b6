"""Metrics in files that stay small: JSON lines, or another sink of summaries.

The first `NUM_SINGLE` values of a metric are kept individually. Later values are
aggregated over intervals of ten seconds, or of a thousandth of the elapsed time if that
is longer. A short run thus keeps every value, and a long one keeps some thousands of
summaries of each metric for each start: about 9,000 in four months. A line is one
summary; `count` is usually 1:

    {"time":1795168800.25,"metric":"/elastic_ckpt/data/rows","count":1,"sum":16.0,
     "min":16.0,"max":16.0,"last":16.0}

(on one line in the file). `step`, the steps that were done by then, and `claim`, the
world that had been claimed (`core.events.counted`), come last if the process records
them. A run that is restarted appends to the same file.

Recording only adds numbers in memory; a background thread passes the summaries to the
sink. If the sink fails, the summaries of that interval are lost and a warning is
logged, but the run continues. A killed process loses the values of its last interval.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging
from etils import epath
from jax import monitoring

from elastic_ckpt.core import errors, jsonlog, metrics

NUM_SINGLE = 1000
INTERVAL_SECS = 10.0
_INTERVALS_A_RUN = 1000
# How long training waits at most for a disk that hangs.
_CLOSE_SECS = 10.0


def subscribe(callback: Callable[[metrics.Metric, float], None]) -> Callable[[], None]:
    """Calls `callback` with each value that is recorded.

    Args:
      callback: called in the thread that records, so it must be quick.

    Returns:
      A function that ends it, and may be called twice.
    """
    is_over = threading.Event()

    def take(event: str, value: float, **_: Any) -> None:
        metric = metrics.METRICS.get(event)
        if metric is not None and not is_over.is_set():
            callback(metric, value)

    # JAX has two types for the same kind of function.
    listener: Any = take

    def end() -> None:
        is_over.set()
        # Other code may have cleared all listeners of the process before.
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_event_duration_listener(listener)
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_scalar_listener(listener)

    monitoring.register_event_duration_secs_listener(listener)
    monitoring.register_scalar_listener(listener)
    return end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The aggregate of one value of a metric, or of several consecutive ones.

    Attributes:
      time: the time of the last value, in seconds since the epoch.
      metric: the name of the metric.
      count: how many values are aggregated.
      sum: the sum of the values.
      min: the smallest value.
      max: the largest value.
      last: the last value.
      step: how many steps were done at the last value; None if this process does not
        record it.
      claim: the number of the world that was claimed by then; None before the first.
      number: the number of the last value among all of the metric, from 1.
    """

    time: float
    metric: str
    count: int
    sum: float
    min: float
    max: float
    last: float
    step: int | None = None
    claim: int | None = None
    number: int

    def followed_by(self, later: Summary) -> Summary:
        """This one together with one of later values."""
        return dataclasses.replace(
            later,
            count=self.count + later.count,
            sum=self.sum + later.sum,
            min=min(self.min, later.min),
            max=max(self.max, later.max),
        )


class Sink(Protocol):
    """Stores summaries; is called by one thread."""

    def write(self, batch: Sequence[Summary]) -> None:
        """Stores `batch`, which is in the order of time for each metric; may raise."""

    def close(self) -> None:
        """Releases the sink's resources; may raise."""


class JsonLines:
    """A sink that appends to a log, which begins with the first batch.

    Args:
      path: of the log, local or in an object store.
    """

    def __init__(self, path: epath.PathLike) -> None:
        self._path = path
        self._log: jsonlog.JsonLog | None = None

    def write(self, batch: Sequence[Summary]) -> None:
        """Appends a line for each summary, durably, in the order of time."""
        try:
            self._log = self._log or jsonlog.writer(self._path)
            self._log.check()
        except errors.RunError:
            # Somebody has removed the file: the next lines begin another one.
            self.close()
            self._log = jsonlog.writer(self._path)
        for summary in sorted(batch, key=lambda each: each.time):
            line = dataclasses.asdict(summary).items()
            shown = {k: v for k, v in line if v is not None and k != "number"}
            self._log.append(shown)
        self._log.sync()

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()


class Summaries:
    """Receives every metric, and passes summaries to a sink in the background.

    Args:
      sink: stores the summaries.
      name: the sink's name in log messages.
      interval_secs: the time between two batches, unless a thousandth of the run is
        longer.
    """

    def __init__(
        self, sink: Sink, *, name: str, interval_secs: float = INTERVAL_SECS
    ) -> None:
        self._sink = sink
        self._name = name
        self._interval_secs = interval_secs
        self._began_secs = time.monotonic()
        self._lock = threading.Lock()
        self._numbers: collections.Counter[str] = collections.Counter()
        # The steps that are done, and the world that is claimed.
        self._at: dict[str, int] = {}
        self._pending: dict[str, list[Summary]] = {}
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._write_at_intervals, name=f"metrics to {name}", daemon=True
        )
        self._thread.start()
        self._unsubscribe = subscribe(self._receive)

    def close(self) -> None:
        """Writes the remaining summaries and closes the sink. Idempotent."""
        self._unsubscribe()
        self._closing.set()
        self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"no answer in {_CLOSE_SECS:.0f} s")

    def _receive(self, metric: metrics.Metric, value: float) -> None:
        now, value = time.time(), float(value)
        one: dict[str, Any] = dict.fromkeys(("sum", "min", "max", "last"), value)
        with self._lock:
            if metric is metrics.TRAIN_STEPS:
                if value == self._at.get("step"):
                    # A process that trains and keeps the journal records it twice.
                    return
                self._at["step"] = int(value)
            elif metric is metrics.TRAIN_CLAIM:
                self._at["claim"] = int(value)
            self._numbers[metric.name] += 1
            number = self._numbers[metric.name]
            summary = Summary(
                time=now, metric=metric.name, count=1, number=number, **one, **self._at
            )
            pending = self._pending.setdefault(metric.name, [])
            if pending and pending[-1].number > NUM_SINGLE:
                summary = pending.pop().followed_by(summary)
            pending.append(summary)

    def _write_at_intervals(self) -> None:
        while not self._closing.wait(self._pause_secs()):
            self._write()
        self._write()
        try:
            self._sink.close()
        except Exception as error:
            self._warn(error)

    def _pause_secs(self) -> float:
        run_secs = time.monotonic() - self._began_secs
        return max(self._interval_secs, run_secs / _INTERVALS_A_RUN)

    def _write(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        batch = list(itertools.chain.from_iterable(pending.values()))
        try:
            if batch:
                self._sink.write(batch)
        # The root of a thread; each kind of storage raises other errors.
        except Exception as error:
            self._warn(error)

    def _warn(self, reason: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.warning(
                "metrics cannot be written to %s (%s); the run continues, and later"
                " metrics are tried again without further warnings",
                self._name,
                reason,
            )
