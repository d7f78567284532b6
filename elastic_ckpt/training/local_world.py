"""A world of hosts on this machine: its start, and the program of a host.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from elastic_ckpt.core import events
from elastic_ckpt.elastic import faults, processes, supervisor
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import elastic_run, listeners, run_directory, schema
from elastic_ckpt.training.configured import groups, limits, memory

# What the fork server imports: nearly all that a host needs comes with these two, and
# the rest would be imported in the pause of a change.
_HOST_IMPORTS = (
    __name__,
    "elastic_ckpt.training.job",
    "elastic_ckpt.elastic.multicontroller",
    "elastic_ckpt.monitoring.jsonl",
    "elastic_ckpt.monitoring.prometheus",
    "elastic_ckpt.monitoring.subscription",
    "elastic_ckpt.monitoring.summaries",
    "elastic_ckpt.monitoring.tensorboard",
    "elastic_ckpt.training.divergence",
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
)


def warm_up() -> None:
    """Starts the fork server, which imports in the background."""
    supervisor.warm_up(_HOST_IMPORTS)


def train(config: schema.Config, world: World) -> None:
    """Trains on one of several hosts of this machine."""
    from elastic_ckpt.core import topology
    from elastic_ckpt.training import job

    job.train(listeners.of_process(config, topology.this_host()), world)


def compile_ahead(config: schema.Config, world: World) -> None:
    """Compiles on one of several hosts of this machine what they may train next."""
    from elastic_ckpt.training import job

    job.compile_ahead(config, world)


def run(
    config: schema.Config,
    emit: events.Emit,
    *,
    train: Callable[[schema.Config, World], object] = train,
) -> None:
    """Trains on hosts of this machine, and returns when the run has ended.

    Args:
      config: of the run; the files of its data exist.
      emit: called for each event of the run.
      train: of each host; picklable.

    Raises:
      RunError: with the first failure of a host; all hosts have ended by then.
      StoppedError: if SIGTERM arrived, and the hosts did not end in time.
    """
    # Otherwise all hosts share one RAM disk, as those of one machine.
    is_elastic = config.elastic.elastic_enabled
    with contextlib.closing(
        processes.configured(
            config.world,
            log_directory=run_directory.logs_of(config),
            memory=memory(config) if is_elastic else None,
            injected=faults.parse(config.elastic.faults),
            limits=limits(config),
            emit=emit,
        )
    ) as cluster:
        elastic_run.run(
            config,
            cluster,
            train,
            groups=groups(config),
            compile_ahead=compile_ahead if is_elastic else None,
            emit=emit,
        )
