"""The common parts of both kinds of JobSet: its checks, ConfigMap and host memory."""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.deploy import (
    failure_policy,
    gpu_network,
    machine,
    monitoring,
    names,
    program,
    ram_disk,
    resources,
    scheduling,
    supervisors,
)
from elastic_ckpt.deploy.addition import Object

# The volume with the program's files.
_CONFIG = "config"
CONFIG_MOUNT = {"name": _CONFIG, "mountPath": program.DIRECTORY, "readOnly": True}
CONTAINER = "train"
# The label of a GKE node that names its node pool.
NODE_POOL = "cloud.google.com/gke-nodepool"
# A container that fails without a message shows the end of its log.
TERMINATION_MESSAGE_POLICY = "FallbackToLogsOnError"


def check(config: schema.Config) -> machine.Machine:
    """Checks the configuration of a run and returns the kind of host that it requires.

    Raises:
      ConfigError: if a value is invalid, or batches do not divide among the hosts.
    """
    deploy = config.deploy
    names.check_image("docker_image", deploy.docker_image)
    names.check_name("namespace", deploy.namespace)
    if deploy.service_account:
        names.check_name("service_account", deploy.service_account, dots=True)
    ram_disk.check(config)
    failure_policy.check(config)
    names.check_size("shared_memory_size_limit", deploy.shared_memory_size_limit)
    program.check(config)
    resources.check(config)
    scheduling.check(config)
    monitoring.check(config)
    gpu_network.check(config)
    host = machine.from_config(config)
    supervisors.check(config, host)
    if program.is_train(config):
        _check_batches(config, host)
    return host


def _check_batches(config: schema.Config, host: machine.Machine) -> None:
    hosts = config.world.slices * host.hosts_per_slice
    # A pod with a supervisor has several hosts.
    on_pod = 0 if supervisors.are_used(config) else host.devices
    devices = hosts * (on_pod or config.world.devices_per_host)
    world = topology.Topology(hosts=hosts, slices=config.world.slices, devices=devices)
    batch_size.schedule(config.data, world)


def metadata(config: schema.Config) -> Object:
    """The name and namespace of each object of a run."""
    return {"name": config.run.run_name, "namespace": config.deploy.namespace}


def config_volume(config: schema.Config) -> Object:
    """The volume with the program's files, which `CONFIG_MOUNT` mounts."""
    return {"name": _CONFIG, "configMap": {"name": config.run.run_name}}


def host_memory(config: schema.Config) -> tuple[list[Object], list[Object]]:
    """The volumes in a host's memory, and their mounts.

    They are the RAM disk, if configured, and the shared memory of its processes.
    """
    size = config.deploy.shared_memory_size_limit
    shared = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mount = {"name": "dshm", "mountPath": "/dev/shm"}
    return (
        [*ram_disk.volumes(config), shared],
        [*ram_disk.mounts(config), mount],
    )


def config_map(config: schema.Config) -> Object:
    """The ConfigMap with the program's files."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config),
        "data": program.files(config),
    }
