"""The listeners of a host's metrics: JSON lines always, others as configured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator

from elastic_ckpt.application import run_directory
from elastic_ckpt.config import schema


def check(section: schema.MetricsSection) -> None:
    """Raises a ConfigError that names the extra if a listener's package is missing."""
    if section.enable_tensorboard:
        from elastic_ckpt.monitoring import tensorboard

        tensorboard.library()
    if section.prometheus_port:
        from elastic_ckpt.monitoring import prometheus

        prometheus.library()


def on_one_machine(section: schema.MetricsSection, host: int) -> schema.MetricsSection:
    """`section` for one of several hosts of a machine: each has its own port."""
    if not section.prometheus_port:
        return section
    return dataclasses.replace(section, prometheus_port=section.prometheus_port + host)


@contextlib.contextmanager
def started(config: schema.Config) -> Iterator[None]:
    """Runs the configured listeners of this host's metrics while the block runs.

    Raises:
      ConfigError: if Prometheus is to be served and cannot be.
    """
    from elastic_ckpt.core import topology
    from elastic_ckpt.monitoring import jsonl, prometheus, summaries, tensorboard

    section = config.metrics
    directory = run_directory.path_of(config)
    host = f"host-{topology.this_host():05d}"
    sinks: dict[str, summaries.Sink] = {}
    lines = os.path.join(directory, run_directory.METRICS, f"{host}.jsonl")
    sinks[lines] = jsonl.JsonLines(lines)
    if section.enable_tensorboard:
        start = time.strftime("%Y%m%d-%H%M%S")
        board = os.path.join(directory, run_directory.TENSORBOARD, host, start)
        sinks[board] = tensorboard.TensorBoard(board)
    with contextlib.ExitStack() as running:
        if section.prometheus_port:
            served = prometheus.Prometheus(
                port=section.prometheus_port, interface=section.prometheus_interface
            )
            running.callback(served.close)
        for name, sink in sinks.items():
            running.callback(summaries.Summaries(sink, name=name).close)
        yield
