"""A callable that hears every metric of `core.metrics` until it is closed."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from jax import monitoring

from elastic_ckpt.core import metrics


class Hear(Protocol):
    """Takes values; is called by the thread that records, so it must be quick."""

    def __call__(self, metric: metrics.Metric, value: float) -> None:
        """Takes one value of `metric`."""


class Subscription:
    """Calls `hear` with each value that is recorded, until `close`.

    Args:
      hear: what to call.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._is_closed = False
        monitoring.register_event_duration_secs_listener(self._take_secs)
        monitoring.register_scalar_listener(self._take)

    def close(self) -> None:
        """Ends it: `hear` is not called any more; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # Somebody may have cleared all listeners of the process before.
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_event_duration_listener(self._take_secs)
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_scalar_listener(self._take)

    def _take_secs(self, event: str, duration_secs: float, **_: Any) -> None:
        self._take(event, duration_secs)

    def _take(self, event: str, value: float, **_: Any) -> None:
        metric = metrics.METRICS.get(event)
        if metric is not None and not self._is_closed:
            self._hear(metric, value)
