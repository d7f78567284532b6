"""Elastic supervisors in the pods of a JobSet: each pod is a machine with one slice.

With `elastic_enabled` the program of a pod starts the hosts of its slice as processes,
and agrees with those of the other pods (`elastic.machines`), which it reaches by the
names that JobSet gives to pods. Hosts that fail are started again in the same pods. The
Job replaces a pod that fails itself, and no other.

The Job's fields are those of Kubernetes 1.33 (`backoffLimitPerIndex`, `successPolicy`).
"""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import machine
from elastic_ckpt.deploy.addition import Object

# The replicated job of the pods, and the port of each supervisor.
REPLICATED_JOB = "hosts"
PORT = 8475


def are_used(config: schema.Config) -> bool:
    """Whether each pod has a supervisor; under Pathways the head is one itself."""
    return config.elastic.elastic_enabled and not config.world.enable_single_controller


def check(config: schema.Config, host: machine.Machine) -> None:
    """Raises a ConfigError if pods cannot have supervisors, but are to.

    Args:
      config: of the run.
      host: the machine of a pod.
    """
    if not are_used(config):
        return
    world = config.world
    if world.hardware == "tpu":
        raise errors.ConfigError(
            "elastic_enabled=true with hardware=tpu: supervisors start hosts on CPUs"
            " and GPUs; set enable_single_controller=true, or elastic_enabled=false"
        )
    if config.deploy.maxtext:
        raise errors.ConfigError(
            "elastic_enabled=true with maxtext: its supervisor works on one machine"
            " only; set elastic_enabled=false"
        )
    if config.elastic.elastic_machines:
        raise errors.ConfigError(
            f"elastic_machines={config.elastic.elastic_machines!r}: the pods have names"
            " of their JobSet; leave it empty"
        )
    if world.slices < 2:
        raise errors.ConfigError(
            f"elastic_enabled=true with slices={world.slices}: each slice is a pod,"
            " and when one is lost the run needs another to continue on; set slices to"
            " 2 or more, and hosts to a multiple of it"
        )
    devices = host.hosts_per_slice * world.devices_per_host
    if host.devices and devices != host.devices:
        raise errors.ConfigError(
            f"devices_per_host={world.devices_per_host} with hosts={world.hosts} in"
            f" slices={world.slices}: the hosts of a pod use {devices} devices, and"
            f" machine_type={config.deploy.machine_type} has {host.devices}; set"
            f" hosts={world.slices} and devices_per_host={host.devices}"
        )


def configured(config: schema.Config) -> schema.Config:
    """The configuration of the program in each pod, with the names of all pods."""
    if not are_used(config):
        return config
    name = config.run.run_name
    machines = ";".join(
        f"{name}-{REPLICATED_JOB}-0-{pod}.{name}:{PORT}"
        for pod in range(config.world.slices)
    )
    elastic = dataclasses.replace(config.elastic, elastic_machines=machines)
    return dataclasses.replace(config, elastic=elastic)


def restarts(config: schema.Config) -> Object:
    """The fields of the Job by which it replaces pods, and ends."""
    return {
        "backoffLimitPerIndex": config.deploy.max_restarts,
        # The first supervisor that ends with success has reported the run's end to all
        # others; a pod that is replaced at that time would wait for them.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }
