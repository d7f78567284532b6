"""A world of hosts on this machine: its check, its start, and the program of a host.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from absl import logging

from elastic_ckpt.application import elastic_run, listeners, run_directory
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import (
    faults,
    processes,
    supervisor,
    termination,
    watch,
    world_host,
)
from elastic_ckpt.elastic.world import World

# What the fork server imports: nearly all that a host needs comes with these two, and
# the rest would be imported in the pause of a change.
_HOST_IMPORTS = (
    __name__,
    "elastic_ckpt.application.host_program",
    "elastic_ckpt.elastic.multicontroller",
    "elastic_ckpt.monitoring.jsonl",
    "elastic_ckpt.monitoring.prometheus",
    "elastic_ckpt.monitoring.subscription",
    "elastic_ckpt.monitoring.summaries",
    "elastic_ckpt.monitoring.tensorboard",
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
)


def warm_up() -> None:
    """Starts the fork server, which imports in the background."""
    supervisor.warm_up(_HOST_IMPORTS)


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the local launcher cannot start the configured world."""
    elastic_run.check_keys(config)
    world, ram = config.world, config.tiers.local_checkpoint_directory
    if not storage.is_local(ram):
        raise errors.ConfigError(
            f"local_checkpoint_directory={ram!r} is not a directory on this machine;"
            " set it to a RAM disk such as /dev/shm/runs, and base_output_directory to"
            " the bucket"
        )
    if world.hardware == "tpu" and world.hosts > 1:
        # libtpu needs the place of each process among all of a world before it
        # starts, and a world of some of the hosts is no topology that it has.
        raise errors.ConfigError(
            f"hosts={world.hosts} with hardware=tpu: the local launcher starts hosts"
            " only on CPUs and GPUs; start one process per host with Slurm or a"
            " JobSet, or set hosts=1"
        )
    if world.hardware != "cpu" and world.hosts == 1:
        # It has as many devices as JAX finds.
        return
    section = config.elastic
    if section.elastic_enabled and world.slices > world.hosts > 1:
        raise errors.ConfigError(
            f"elastic_enabled=true with slices={world.slices} and hosts={world.hosts}:"
            " a slice must consist of whole hosts, which are lost with it; set hosts"
            " to a multiple of slices, or to 1"
        )
    elastic_run.check_world(config)


def train(config: schema.Config, world: World) -> None:
    """Trains on one of several hosts of this machine."""
    from elastic_ckpt.application import host_program
    from elastic_ckpt.core import topology

    host_program.train(listeners.of_process(config, topology.this_host()), world)


def compile_ahead(config: schema.Config, world: World) -> None:
    """Compiles on one of several hosts of this machine what they may train next."""
    from elastic_ckpt.application import host_program

    host_program.compile_ahead(config, world)


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
    section = config.elastic
    # Otherwise all hosts share one RAM disk, as those of one machine.
    is_elastic = section.elastic_enabled
    with contextlib.closing(
        processes.configured(
            config.world,
            log_directory=run_directory.logs_of(config),
            memory=memory(config) if is_elastic else None,
            injected=faults.parse(section.faults),
            limits=limits(config),
            emit=emit,
        )
    ) as cluster:
        elastic_run.run(
            config,
            cluster,
            train,
            groups=elastic_run.groups(config),
            compile_ahead=compile_ahead if is_elastic else None,
            emit=emit,
        )


def limits(config: schema.Config) -> watch.Limits:
    """How long hosts may take."""
    grace_secs = termination.grace_secs(config.deploy)
    if not config.elastic.elastic_enabled:
        return watch.unlimited(grace_secs=grace_secs)
    ahead_secs = config.elastic.elastic_compile_ahead_seconds
    if ahead_secs and config.world.hardware != "cpu":
        logging.info(
            "nothing is compiled ahead: the hosts that train have all devices of"
            " hardware=%s, and hosts that compile need some",
            config.world.hardware,
        )
        ahead_secs = 0.0
    return watch.Limits(
        compile_ahead_secs=ahead_secs,
        most_secs=config.elastic.elastic_hang_timeout_seconds,
        heartbeat_secs=config.elastic.elastic_heartbeat_timeout_seconds,
        grace_secs=grace_secs,
    )


def memory(config: schema.Config) -> world_host.SliceMemory | None:
    """The RAM disks of slices; None if hosts keep no checkpoints there."""
    if not config.tiers.enable_multi_tier_checkpointing:
        return None
    return world_host.SliceMemory(
        directory=config.tiers.local_checkpoint_directory,
        run=config.run.run_name,
        tls_certificate=config.tiers.peer_tls_certificate or None,
        tls_key=config.tiers.peer_tls_key or None,
    )
