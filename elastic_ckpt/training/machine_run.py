"""An elastic run on several machines: the supervisor of each leads it, or follows.

The leader keeps the journal of the run; see `elastic.machine`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import (
    faults,
    process_cluster,
    processes,
    scale_request,
    station,
)
from elastic_ckpt.elastic.machine import MachineSupervisor
from elastic_ckpt.elastic.processes import Place
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import (
    configured,
    elastic_run,
    journal,
    keys,
    listeners,
    run_directory,
    schema,
)

# Keys that may differ between machines.
_OWN_KEYS = (
    "elastic_machine",
    "peer_interface",
    "peer_port",
    "peer_domains",
    "peer_tls_certificate",
    "peer_tls_key",
    "peer_tls_ca",
)


def place(config: schema.Config, environment: Mapping[str, str]) -> Place:
    """The place that is configured for this machine.

    Raises:
      ConfigError: if it is not, or contradicts other keys.
    """
    section, world = config.elastic, config.world
    if not section.elastic_enabled:
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines} needs elastic_enabled=true:"
            " otherwise another launcher starts the hosts; set elastic_enabled=true, or"
            " elastic_machines=1"
        )
    configured.check_checkpoints(config)
    if world.enable_single_controller:
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines} with"
            " enable_single_controller=true: only runs with a process per host have"
            " supervisors on several machines; set elastic_machines=1"
        )
    if world.hosts % world.slices:
        raise errors.ConfigError(
            f"slices={world.slices} with hosts={world.hosts} cannot be divided evenly"
            f" among {section.elastic_machines} machines; set hosts to a multiple of"
            " slices"
        )
    number = section.elastic_machine
    return processes.place(
        *(section.elastic_machines, number if number >= 0 else None),
        slices=world.slices,
        interface=config.tiers.peer_interface,
        environment=environment,
        names=("elastic_machines", "elastic_machine"),
    )


def run(
    config: schema.Config,
    own: Place,
    show: events.Emit,
    *,
    train: Callable[[schema.Config, World], object] = elastic_run.train,
    program: Sequence[str] = (),
) -> bool:
    """Supervises the hosts of this machine until the run has ended.

    Args:
      config: of the run; the files of its data exist.
      own: the place of this machine.
      show: called for the events of the run while this machine leads.
      train: of each host; picklable.
      program: of the hosts, besides the configuration: equal on all machines.

    Returns:
      Whether the run, or this machine, was asked to end before the last step.

    Raises:
      RunError: with the first failure of the run; or if no leader can be reached.
    """
    limits, groups = configured.limits(config), configured.groups(config)

    def lead(cluster: process_cluster.ProcessCluster, emit: events.Emit) -> None:
        elastic_run.run(config, cluster, train, groups=groups, emit=emit)

    def kept() -> contextlib.AbstractContextManager[events.Emit]:
        return journal.kept(
            config,
            show,
            listening=listeners.of_supervisor(config),
            # A leader that is cut off, or frozen, would hold it.
            is_locked=False,
        )

    with contextlib.closing(
        station.Station(
            config.world,
            slices=own.slices,
            memory=configured.memory(config),
            log_directory=run_directory.logs_of(config),
            grace_secs=limits.grace_secs,
            interface=own.interface,
        )
    ) as here:
        here.train = functools.partial(train, config)
        return MachineSupervisor(
            here,
            lead,
            shared=run_directory.steps_of(run_directory.path_of(config)),
            injected=faults.parse(config.elastic.faults),
            limits=limits,
            lost_secs=config.elastic.elastic_machine_timeout_seconds,
            kept=kept,
            configured=_digest(config, program),
            policy=configured.policy(config, groups),
            show=show,
            begin=lambda: scale_request.remove(run_directory.path_of(config)),
        ).run()


def _digest(config: schema.Config, program: Sequence[str]) -> str:
    values = keys.values(config)
    shared = {name: values[name] for name in sorted(values) if name not in _OWN_KEYS}
    named = [word for word in program if word.partition("=")[0] not in _OWN_KEYS]
    return hashlib.sha256(storage.canonical_json([shared, named])).hexdigest()
