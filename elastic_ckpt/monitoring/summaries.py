"""Metrics in files that stay small: JSON lines, or another sink of summaries.

The first `NUM_SINGLE` values of a metric are kept individually. Later values are
aggregated over intervals of ten seconds or a thousandth of the elapsed time, whichever
is longer. A short run thus keeps every value, and a long run keeps a few thousand
summaries per metric and launch: about 9,000 in four months. A line is one summary;
`count` is usually 1:

    {"time":1795168800.25,"metric":"/elastic_ckpt/data/rows","count":1,"sum":16.0,
     "min":16.0,"max":16.0,"last":16.0}

(on one line in the file). If the process records them, `step`, the number of completed
steps by then, and `claim`, the last claimed world (`core.events.counted`), come last. A
restarted run appends to the same file.

Recording only adds numbers in memory; a background thread passes the summaries to the
sink. If the sink fails, the summaries for that interval are lost and a warning is
logged, but the run continues. A killed process loses the values of its last interval.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from absl import logging
from etils import epath
from jax import monitoring

from elastic_ckpt.core import jsonlog, metrics

NUM_SINGLE = 1000
INTERVAL_SECS = 10.0
_INTERVALS_A_RUN = 1000
# The longest time that training waits for a disk that hangs.
_CLOSE_SECS = 10.0


@contextlib.contextmanager
def subscribed(callback: Callable[[metrics.Metric, float], None]) -> Iterator[None]:
    """Calls `callback` with each value that is recorded while the block runs.

    Args:
      callback: a function called in the thread that records, so it must be quick.
    """

    def take(event: str, value: float, **_: Any) -> None:
        metric = metrics.METRICS.get(event)
        if metric is not None:
            callback(metric, value)

    # JAX has two types for the same kind of function.
    listener: Any = take
    monitoring.register_event_duration_secs_listener(listener)
    monitoring.register_scalar_listener(listener)
    try:
        yield
    finally:
        for unregister in (
            monitoring.unregister_event_duration_listener,
            monitoring.unregister_scalar_listener,
        ):
            # Other code may have cleared all listeners in this process.
            with contextlib.suppress(AssertionError, ValueError):
                unregister(listener)


# A line in a file: the `time` of the last value, in seconds since the epoch; the name
# of the `metric`; `count`, `sum`, `min`, `max` and `last` of the values; and `step` and
# `claim` at the last value, if this process knows them.
Summary: TypeAlias = dict[str, Any]
# Stores summaries, ordered by time within each metric; may raise.
Write: TypeAlias = Callable[[Sequence[Summary]], None]
# The thread that writes opens and closes the sink.
Sink: TypeAlias = contextlib.AbstractContextManager[Write]


@contextlib.contextmanager
def json_lines(path: epath.PathLike) -> Iterator[Write]:
    """A sink that durably appends summaries to a log, local or in an object store."""
    with contextlib.ExitStack() as all_opened:

        @functools.cache
        def log() -> jsonlog.JsonLog:
            return all_opened.enter_context(contextlib.closing(jsonlog.writer(path)))

        def write(batch: Sequence[Summary]) -> None:
            for summary in sorted(batch, key=lambda each: each["time"]):
                log().append(summary)
            log().sync()

        yield write


@contextlib.contextmanager
def listening(
    sink: Sink, *, name: str, interval_secs: float = INTERVAL_SECS
) -> Iterator[None]:
    """Passes summaries of every metric to a sink while the block runs, in a thread.

    `name` is the sink's name in log messages. Batches are at least `interval_secs` and
    a thousandth of the run's duration apart.
    """
    pending, closing, warned = _Pending(), threading.Event(), threading.Event()
    began_secs = time.monotonic()

    def warn(reason: object) -> None:
        if not warned.is_set():
            warned.set()
            logging.warning(
                "metrics cannot be written to %s (%s); the run continues and tries to"
                " write later metrics without additional warnings",
                name,
                reason,
            )

    @contextlib.contextmanager
    def warning() -> Iterator[None]:
        try:
            yield
        # Each kind of storage raises its own errors.
        except Exception as error:
            warn(error)

    def run() -> None:
        is_last = False
        with warning(), sink as write:
            while not is_last:
                run_secs = time.monotonic() - began_secs
                is_last = closing.wait(max(interval_secs, run_secs / _INTERVALS_A_RUN))
                with warning():
                    if batch := pending.take():
                        write(batch)

    thread = threading.Thread(target=run, name=f"metrics to {name}", daemon=True)
    thread.start()
    try:
        with subscribed(pending.add):
            yield
    finally:
        closing.set()
        thread.join(_CLOSE_SECS)
        if thread.is_alive():
            warn(f"no answer in {_CLOSE_SECS:.0f} s")


class _Pending:
    # The summaries since the last batch.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        # The number of completed steps, and the claimed world.
        self._at: dict[str, int] = {}
        # Keyed by metric and the value's position.
        self._summaries: dict[tuple[str, int], Summary] = {}

    def add(self, metric: metrics.Metric, value: float) -> None:
        value, name = float(value), metric.name
        with self._lock:
            if metric is metrics.TRAIN_STEPS:
                if value == self._at.get("step"):
                    # Recorded twice if a process trains and writes the journal.
                    return
                self._at["step"] = int(value)
            elif metric is metrics.TRAIN_CLAIM:
                self._at["claim"] = int(value)
            summary: Summary = {
                "time": time.time(),
                "metric": name,
                "count": 1,
                **dict.fromkeys(("sum", "min", "max", "last"), value),
                **self._at,
            }
            self._counts[name] += 1
            # All later values share one place.
            place = name, min(self._counts[name], NUM_SINGLE + 1)
            before = self._summaries.get(place)
            if before is not None:
                summary |= {
                    "count": before["count"] + 1,
                    "sum": before["sum"] + value,
                    "min": min(before["min"], value),
                    "max": max(before["max"], value),
                }
            self._summaries[place] = summary

    def take(self) -> list[Summary]:
        with self._lock:
            taken, self._summaries = self._summaries, {}
        return list(taken.values())
