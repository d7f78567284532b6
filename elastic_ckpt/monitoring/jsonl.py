"""Metrics as JSON lines: a file per host, each line a summary of one metric.

A line represents `count` values of a metric, usually one; `monitoring.summaries`
describes the aggregation:

    {"time":1795168800.25,"metric":"/elastic_ckpt/data/rows","count":1,"sum":16.0,
     "min":16.0,"max":16.0,"last":16.0}

(on one line in the file). `time` is that of the last value, in seconds since the
epoch. `step`, the steps that were done by then, and `claim`, the world that had been
claimed (`core.events.counted`), come last if the process records them. A run that is
restarted appends to the same file.
"""

from __future__ import annotations

from collections.abc import Sequence

from etils import epath

from elastic_ckpt.core import errors, jsonlog
from elastic_ckpt.monitoring import summaries


class JsonLines:
    """A sink that appends to a log, which begins with the first batch.

    Args:
      path: of the log, local or in an object store.
    """

    def __init__(self, path: epath.PathLike) -> None:
        self._path = path
        self._log: jsonlog.JsonLog | None = None

    def write(self, batch: Sequence[summaries.Summary]) -> None:
        """Appends a line for each summary, durably, in the order of time."""
        try:
            self._log = self._log or jsonlog.writer(self._path)
            self._log.check()
        except errors.RunError:
            # Somebody has removed the file: the next lines begin another one.
            self.close()
            self._log = jsonlog.writer(self._path)
        for summary in sorted(batch, key=lambda each: each.time):
            self._log.append(
                {
                    "time": summary.time,
                    "metric": summary.metric.name,
                    "count": summary.count,
                    "sum": summary.sum,
                    "min": summary.min,
                    "max": summary.max,
                    "last": summary.last,
                    **({} if summary.step is None else {"step": summary.step}),
                    **({} if summary.claim is None else {"claim": summary.claim}),
                }
            )
        self._log.sync()

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()
