"""A subscription to every value that `core.metrics` records."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from jax import monitoring

from elastic_ckpt.core import metrics


class Callback(Protocol):
    """Receives values in the thread that records them, so it must be quick."""

    def __call__(self, metric: metrics.Metric, value: float) -> None:
        """Receives one value of `metric`."""


class Subscription:
    """Calls `callback` with each value that is recorded, until `close`.

    Args:
      callback: called with each value.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._is_closed = False
        monitoring.register_event_duration_secs_listener(self._take_secs)
        monitoring.register_scalar_listener(self._take)

    def close(self) -> None:
        """Ends the subscription: `callback` is not called again. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # Other code may have cleared all listeners of the process before.
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_event_duration_listener(self._take_secs)
        with contextlib.suppress(AssertionError, ValueError):
            monitoring.unregister_scalar_listener(self._take)

    def _take_secs(self, event: str, duration_secs: float, **_: Any) -> None:
        self._take(event, duration_secs)

    def _take(self, event: str, value: float, **_: Any) -> None:
        metric = metrics.METRICS.get(event)
        if metric is not None and not self._is_closed:
            self._callback(metric, value)
