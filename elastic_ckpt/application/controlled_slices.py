"""An elastic run under a single controller: this process trains on all slices.

The slices are those of Pathways, or groups of this process's CPU devices that stand for
them. It imports JAX only where it is used.
"""

from __future__ import annotations

import contextlib

from elastic_ckpt.application import elastic_run, journal
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.elastic import faults, single_controller, termination


def is_simulated(config: schema.Config) -> bool:
    """Whether CPU devices of this process are to stand for slices that can be lost."""
    world = config.world
    return (
        config.elastic.elastic_enabled
        and not world.enable_single_controller
        and world.hardware == "cpu"
        and world.hosts == 1
        and world.slices > 1
    )


def run(config: schema.Config, emit: journal.Journal) -> None:
    """Trains on the slices that are there, and returns when the run has ended.

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

    from elastic_ckpt.application import host_program
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import pathways, simulated_slices

    number = config.world.slices
    if is_simulated(config):
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
            grace_secs=termination.grace_secs(config.deploy),
            ended=emit.stopped_without_a_save,
            emit=emit,
        )
    ) as cluster:
        elastic_run.run(
            config,
            cluster,
            host_program.train,
            groups=elastic_run.Groups(number=number, full=topology.present(number)),
            emit=emit,
        )
