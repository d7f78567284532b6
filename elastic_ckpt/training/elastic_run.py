"""An elastic run as it is configured, over any cluster.

`run_on_hosts` trains on processes of this machine, `run_here` on slices that this
process controls.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import (
    faults,
    host,
    process_cluster,
    runtime,
    scale_request,
    station,
)
from elastic_ckpt.elastic.cluster import Cluster
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import configured, journal, listeners, run_directory, schema
from elastic_ckpt.training.configured import Groups

# What the fork server imports, and would else be imported in the pause of a change.
_HOST_IMPORTS = (
    *host.IMPORTS,
    __name__,
    "elastic_ckpt.training.trainer",
    "elastic_ckpt.monitoring.prometheus",
    "elastic_ckpt.monitoring.summaries",
    "elastic_ckpt.monitoring.tensorboard",
    "grain._src.python.dataset.transformations.slice",
)


def run(
    config: schema.Config,
    cluster: Cluster,
    train: Callable[[schema.Config, World], object],
    *,
    groups: Groups,
    emit: events.Emit,
) -> None:
    """Trains on the groups of a cluster that are there, until the run has ended.

    Args:
      config: of the run; the files of its data exist.
      cluster: closed by the caller.
      train: of each host.
      groups: all that the cluster may have.
      emit: called for each event of the run.

    Raises:
      RunError: see `runtime.run`.
    """
    chosen = configured.policy(config, groups)
    if config.elastic.elastic_enabled:
        directory = run_directory.path_of(config)
        chosen = scale_request.ScaledPolicy(directory, chosen)
    runtime.run(
        functools.partial(train, config),
        cluster=cluster,
        policy=chosen,
        work=configured.work(config, groups),
        emit=emit,
    )


def warm_up() -> None:
    """Starts the fork server, which imports in the background."""
    station.warm_up(_HOST_IMPORTS)


def train(config: schema.Config, world: World) -> None:
    """Trains on one of several hosts of this machine."""
    from elastic_ckpt.core import topology
    from elastic_ckpt.training import trainer

    trainer.train(listeners.of_process(config, topology.this_host()), world)


def run_on_hosts(
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
    scale_request.remove(run_directory.path_of(config))
    # Otherwise all hosts share one RAM disk, as those of one machine.
    is_elastic = config.elastic.elastic_enabled
    limits = configured.limits(config)
    with contextlib.closing(
        station.Station(
            config.world,
            memory=configured.memory(config) if is_elastic else None,
            log_directory=run_directory.logs_of(config),
            grace_secs=limits.grace_secs,
        )
    ) as own:
        cluster = process_cluster.ProcessCluster(
            process_cluster.Machines(own),
            limits=limits,
            injected=faults.parse(config.elastic.faults),
            emit=emit,
        )
        with cluster:
            groups = configured.groups(config)
            run(config, cluster, train, groups=groups, emit=emit)


def run_here(config: schema.Config, emit: journal.Journal) -> None:
    """Trains in this process on the slices that are there, until the run has ended.

    They are those of Pathways, or groups of this process's CPU devices that stand for
    them.

    Args:
      config: of the run; the files of its data exist.
      emit: called for each event of the run.

    Raises:
      ConfigError: if the slices are not those of the hardware, or faults are configured
        that they cannot have.
      RunError: see `runtime.run`.
    """
    scale_request.remove(run_directory.path_of(config))
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import pathways
    from elastic_ckpt.training import trainer

    number = config.world.slices
    if configured.is_simulated(config):
        slices = pathways.SimulatedSlices(number)
    else:
        slices = pathways.manager.Manager()
    if slices.total_slice_count != number:
        raise errors.ConfigError(
            f"slices={number}, but the hardware has {slices.total_slice_count}; set"
            f" slices={slices.total_slice_count}"
        )
    with contextlib.closing(
        pathways.Pathways(
            slices,
            injected=faults.parse(config.elastic.faults),
            grace_secs=configured.grace_secs(config),
            ended=emit.stopped_early,
            emit=emit,
        )
    ) as cluster:
        run(
            config,
            cluster,
            trainer.train,
            groups=Groups(number=number, full=topology.present(number)),
            emit=emit,
        )
