"""The listeners of a host's metrics: JSON lines always, others as configured."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import run_directory, schema


def check(section: schema.MetricsSection) -> None:
    """Raises a ConfigError that names the extra if a listener's package is missing."""
    if section.enable_tensorboard:
        from elastic_ckpt.monitoring import tensorboard

        tensorboard.library()
    if section.prometheus_port:
        from elastic_ckpt.monitoring import prometheus

        prometheus.library()


def of_process(config: schema.Config, host: int | None = None) -> schema.Config:
    """`config` for one of several processes of a machine: each has its own port.

    All machines use the same ports, because the hosts of each are numbered in a row.

    Args:
      config: of the run.
      host: the number of the host in its world; None for the supervisor, whose port
        follows those of the hosts.
    """
    section = config.metrics
    if not section.prometheus_port:
        return config
    on_machine = config.world.hosts // config.elastic.elastic_machines
    place = on_machine if host is None else host % on_machine
    section = dataclasses.replace(
        section, prometheus_port=section.prometheus_port + place
    )
    return dataclasses.replace(config, metrics=section)


def of_supervisor(config: schema.Config) -> contextlib.AbstractContextManager[None]:
    """As `started`, for the process that supervises the hosts of this machine."""
    return started(of_process(config), name="run")


def started(
    config: schema.Config, *, name: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """As `running`, for a run that is configured here."""
    return running(run_directory.path_of(config), config.metrics, name=name)


@contextlib.contextmanager
def running(
    directory: str,
    section: schema.MetricsSection | None = None,
    *,
    name: str | None = None,
) -> Iterator[None]:
    """Runs the listeners of this process's metrics while the block runs.

    Args:
      directory: of the run.
      section: the listeners besides JSON lines; none by default.
      name: of the files; None for those of this host.

    Raises:
      ConfigError: if Prometheus is to be served and cannot be.
    """
    from elastic_ckpt.core import topology
    from elastic_ckpt.monitoring import prometheus, summaries, tensorboard

    section = section or schema.MetricsSection()
    name = name or f"host-{topology.this_host():05d}"
    lines = os.path.join(directory, run_files.METRICS, f"{name}.jsonl")
    sinks = {lines: summaries.json_lines(lines)}
    if section.enable_tensorboard:
        board = os.path.join(directory, run_files.TENSORBOARD, name)
        sinks[board] = tensorboard.event_file(board)
    with contextlib.ExitStack() as running:
        if section.prometheus_port:
            running.enter_context(
                prometheus.serving(
                    port=section.prometheus_port,
                    interface=section.prometheus_interface,
                )
            )
        for place, sink in sinks.items():
            running.enter_context(summaries.listening(sink, name=place))
        yield
