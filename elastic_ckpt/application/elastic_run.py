"""An elastic run as it is configured: over any cluster, or slices of this process.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from elastic_ckpt.application import configured, journal, run_directory
from elastic_ckpt.application.configured import (
    Groups,
    check_checkpoints,
    groups,
    policy,
)
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import faults, runtime, scale_request, single_controller
from elastic_ckpt.elastic.cluster import Cluster
from elastic_ckpt.elastic.world import World

__all__ = ["check_checkpoints", "groups", "policy", "run", "run_here"]


def run(
    config: schema.Config,
    cluster: Cluster,
    train: Callable[[schema.Config, World], object],
    *,
    groups: Groups,
    compile_ahead: Callable[[schema.Config, World], object] | None = None,
    emit: events.Emit,
) -> None:
    """Trains on the groups of a cluster that are there, until the run has ended.

    Args:
      config: of the run; the files of its data exist.
      cluster: closed by the caller.
      train: of each host.
      groups: all that the cluster may have.
      compile_ahead: of each host; see `runtime.run`.
      emit: called for each event of the run.

    Raises:
      RunError: see `runtime.run`.
    """
    chosen = policy(config, groups)
    if config.elastic.elastic_enabled:
        directory = run_directory.path_of(config)
        chosen = scale_request.ScaledPolicy(directory, chosen)
    runtime.run(
        functools.partial(train, config),
        cluster=cluster,
        policy=chosen,
        work=configured.work(config, groups),
        compile_ahead=None
        if compile_ahead is None
        else functools.partial(compile_ahead, config),
        emit=emit,
    )


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
    single_controller.check_installed("elastic_enabled=true in one process")
    from pathwaysutils.elastic import manager

    from elastic_ckpt.application import job
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import pathways, simulated_slices

    number = config.world.slices
    if configured.is_simulated(config):
        slices = simulated_slices.SimulatedSlices(number)
    else:
        slices = manager.Manager()
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
            ended=emit.stopped_without_a_save,
            emit=emit,
        )
    ) as cluster:
        run(
            config,
            cluster,
            job.train,
            groups=Groups(number=number, full=topology.present(number)),
            emit=emit,
        )
