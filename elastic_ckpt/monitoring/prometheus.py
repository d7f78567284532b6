"""Metrics served to Prometheus; requires the `prometheus` extra.

Names follow Prometheus conventions: `secs` becomes `seconds`, and counters end in
`_total`. `/elastic_ckpt/data/wait_secs` is the histogram
`elastic_ckpt_data_wait_seconds`, and `/elastic_ckpt/data/rows` is the counter
`elastic_ckpt_data_rows_total`. A gauge is served only once it is recorded: a process
that does not know a run's goodput must not report 0. Counts begin at 0 in each process,
as Prometheus expects. Anyone who can reach the port can read the metrics.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ckpt.core import errors, extras, metrics
from elastic_ckpt.monitoring import summaries

# From waiting for a batch that is already available to restoring a huge model.
BUCKETS_SECS = (
    *(0.0001, 0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


@contextlib.contextmanager
def serving(*, port: int, interface: str = "127.0.0.1") -> Iterator[int]:
    """Serves every metric over HTTP while the block runs; yields the port.

    Args:
      port: the port to listen on; 0 lets the system choose one.
      interface: the interface to listen on, for example `0.0.0.0` for all.

    Raises:
      ConfigError: if the extra is not installed or the port cannot be opened.
    """
    client = extras.module(
        "prometheus_client", extra="prometheus", otherwise="set prometheus_port=0"
    )
    registry, lock = client.CollectorRegistry(), threading.Lock()
    recorder = functools.cache(functools.partial(_recorder, client, registry=registry))
    for metric in metrics.METRICS.values():
        if metric.kind != "gauge":
            recorder(metric)

    def receive(metric: metrics.Metric, value: float) -> None:
        with lock:
            record = recorder(metric)
        record(value)

    try:
        server, thread = client.start_http_server(port, interface, registry)
    except (OSError, OverflowError) as error:
        raise errors.ConfigError(
            f"cannot serve metrics on {interface}, port {port} ({error}); set"
            " prometheus_port to a free port, or to 0 to turn Prometheus off"
        ) from None
    try:
        with summaries.subscribed(receive):
            yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spelling(metric: metrics.Metric) -> str:
    """The Prometheus name of `metric`, without a counter's `_total` suffix."""
    name = metric.name.removeprefix("/").replace("/", "_")
    return f"{name.removesuffix('secs')}seconds" if metric.unit == "secs" else name


def _recorder(
    client: Any, metric: metrics.Metric, *, registry: Any
) -> Callable[[float], None]:
    name, text = spelling(metric), f"{metric.meaning} ({metric.unit})"
    if metric.kind == "duration":
        return client.Histogram(
            name, text, registry=registry, buckets=BUCKETS_SECS
        ).observe
    if metric.kind == "counter":
        return client.Counter(name, text, registry=registry).inc
    return client.Gauge(name, text, registry=registry).set
