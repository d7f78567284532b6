"""Metrics served to Prometheus; needs the extra `prometheus`.

Names are those of `core.metrics` as Prometheus spells them: `secs` is `seconds`, and an
amount ends in `_total`. `/elastic_ckpt/data/wait_secs` is the histogram
`elastic_ckpt_data_wait_seconds`, `/elastic_ckpt/data/rows` the counter
`elastic_ckpt_data_rows_total`, and a level is a gauge. They count from the start of
this process, as Prometheus expects. Whoever reaches the port can read them.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.monitoring import subscription

# From a batch that was ready to the restore of a huge model.
BUCKETS_SECS = (
    *(0.0001, 0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

# How soon the server sees that it is to end; its library's own takes half a second.
_POLL_SECS = 0.05


class Prometheus:
    """Serves every metric over HTTP until it is closed.

    Args:
      port: to listen at; 0 has the system choose one.
      interface: to listen at, for example `0.0.0.0` for all.

    Attributes:
      port: where it listens.

    Raises:
      ConfigError: if the extra is not installed, or the port cannot be had.
    """

    def __init__(self, *, port: int, interface: str = "127.0.0.1") -> None:
        client = library()
        registry = client.CollectorRegistry()
        self._take = {
            name: _taker(client, metric, registry)
            for name, metric in metrics.METRICS.items()
        }
        try:
            self._server = _server(
                (interface, port), client.MetricsHandler.factory(registry)
            )
        except (OSError, OverflowError) as error:
            raise errors.ConfigError(
                f"cannot serve metrics at {interface}, port {port} ({error}); set"
                " prometheus_port to a free one, or to 0 to serve none"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": _POLL_SECS},
            name=f"metrics at port {self.port}",
            daemon=True,
        )
        self._thread.start()
        self._subscription = subscription.Subscription(self._hear)

    def close(self) -> None:
        """Stops listening and frees the port; a second call does nothing."""
        self._subscription.close()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _hear(self, metric: metrics.Metric, value: float) -> None:
        self._take[metric.name](value)


def library() -> Any:
    """`prometheus_client`.

    Raises:
      ConfigError: if it is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise errors.ConfigError(
            f"the package prometheus-client cannot be imported ({error}); install it"
            " with `pip install elastic-ckpt[prometheus]`, or set prometheus_port=0"
        ) from None
    return prometheus_client


def spelling(metric: metrics.Metric) -> str:
    """The name of `metric` in Prometheus, without the `_total` of a counter."""
    name = metric.name.removeprefix("/").replace("/", "_")
    return f"{name.removesuffix('secs')}seconds" if metric.unit == "secs" else name


def _server(address: tuple[str, int], handler: Any) -> socketserver.TCPServer:
    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True

    return Server(address, handler)


def _taker(
    client: Any, metric: metrics.Metric, registry: Any
) -> Callable[[float], None]:
    name, said = spelling(metric), f"{metric.meaning} ({metric.unit})"
    if metric.kind == "duration":
        return client.Histogram(
            name, said, registry=registry, buckets=BUCKETS_SECS
        ).observe
    if metric.kind == "counter":
        return client.Counter(name, said, registry=registry).inc
    return client.Gauge(name, said, registry=registry).set
