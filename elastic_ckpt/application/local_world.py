"""A world of hosts on this machine: its check, its start, and the program of a host.

It imports JAX only where it is used, so that the fork server starts at once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

from elastic_ckpt.application import listeners, run_directory
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import member, supervisor, termination

# The fork server imports it, and with it all that a host needs.
_HOST_PROGRAM = "elastic_ckpt.application.host_program"


def warm_up() -> None:
    """Starts the fork server, which imports in the background."""
    supervisor.warm_up([_HOST_PROGRAM])


def check(config: schema.Config) -> None:
    """Raises a ConfigError if the local launcher cannot start the configured world."""
    from elastic_ckpt.core import topology
    from elastic_ckpt.data import batch_size

    world = config.world
    if world.hardware != "cpu":
        if world.hosts > 1:
            raise errors.ConfigError(
                f"hosts={world.hosts} with hardware={world.hardware}: the local"
                " launcher starts CPU hosts; start one process a host with Slurm or a"
                " JobSet, or set hosts=1"
            )
        return
    expected = topology.Topology(
        hosts=world.hosts,
        slices=world.slices,
        devices=world.hosts * world.devices_per_host,
    )
    expected.check()
    batch_size.schedule(config.data, expected)


def run_host(config: schema.Config, place: member.Member, emit: events.Emit) -> None:
    """Joins the world as the host `place`, and trains on it."""
    from elastic_ckpt.application import host_program
    from elastic_ckpt.data import token_blocks
    from elastic_ckpt.elastic import multicontroller

    # All of them are on this machine; its cores are shared.
    os.environ[token_blocks.LOCAL_HOSTS_VARIABLE] = str(place.num_hosts)
    multicontroller.configure(config.world)
    metrics = listeners.on_one_machine(config.metrics, place.host)
    with multicontroller.joined(place):
        host_program.run(dataclasses.replace(config, metrics=metrics), emit)


def run(
    config: schema.Config,
    emit: events.Emit,
    *,
    program: Callable[[schema.Config, member.Member, events.Emit], None] = run_host,
) -> None:
    """Starts the hosts of `config`, and returns when all of them are done.

    Args:
      config: of the run; the files of its data exist.
      emit: called for each event of the run.
      program: of each host; picklable.

    Raises:
      RunError: with the first failure of a host; all hosts have ended by then.
      StoppedError: if SIGTERM arrived, and the hosts did not end in time.
    """
    logs = os.path.join(run_directory.path_of(config), run_directory.LOGS)
    supervisor.World(
        functools.partial(program, config),
        num_hosts=config.world.hosts,
        # A new directory: this may be a second start of a run that is alive.
        log_directory=storage.make_unique_directory(logs),
        emit=emit,
        grace_secs=termination.grace_secs(config.deploy),
    ).run()
