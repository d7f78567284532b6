"""Aggregates the values of metrics, so that their files stay small.

The first `NUM_SINGLE` values of a metric are kept individually. Later values are
aggregated over intervals of ten seconds, or of a thousandth of the elapsed time if that
is longer. A short run thus keeps every value, and a long one keeps some thousands of
summaries of each metric for each start: about 9,000 in four months.

Recording only adds numbers in memory; a background thread passes the summaries to the
sink. If the sink fails, the summaries of that interval are lost and a warning is
logged, but the run continues. A killed process loses the values of its last interval.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from absl import logging

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import subscription

NUM_SINGLE = 1000
INTERVAL_SECS = 10.0
_INTERVALS_A_RUN = 1000
# How long training waits at most for a disk that hangs.
_CLOSE_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The aggregate of one value of a metric, or of several consecutive ones.

    Attributes:
      metric: the metric.
      time: the time of the last value, in seconds since the epoch.
      number: the number of the last value among all of the metric, from 1.
      step: how many steps were done at the last value; None if this process does not
        record it.
      claim: the number of the world that was claimed by then; None before the first.
      count: how many values are aggregated.
      sum: the sum of the values.
      min: the smallest value.
      max: the largest value.
      last: the last value.
    """

    metric: metrics.Metric
    time: float
    number: int
    step: int | None = None
    claim: int | None = None
    count: int
    sum: float
    min: float
    max: float
    last: float

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
        self._step: int | None = None
        self._claim: int | None = None
        self._pending: dict[str, list[Summary]] = {}
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._write_at_intervals, name=f"metrics to {name}", daemon=True
        )
        self._thread.start()
        self._subscription = subscription.Subscription(self._receive)

    def close(self) -> None:
        """Writes the remaining summaries and closes the sink. Idempotent."""
        self._subscription.close()
        self._closing.set()
        self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"no answer in {_CLOSE_SECS:.0f} s")

    def _receive(self, metric: metrics.Metric, value: float) -> None:
        now, value = time.time(), float(value)
        with self._lock:
            if metric is metrics.TRAIN_STEPS:
                if value == self._step:
                    # A process that trains and keeps the journal records it twice.
                    return
                self._step = int(value)
            elif metric is metrics.TRAIN_CLAIM:
                self._claim = int(value)
            self._numbers[metric.name] += 1
            summary = Summary(
                metric=metric,
                time=now,
                number=self._numbers[metric.name],
                step=self._step,
                claim=self._claim,
                count=1,
                sum=value,
                min=value,
                max=value,
                last=value,
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
        if not batch:
            return
        try:
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
