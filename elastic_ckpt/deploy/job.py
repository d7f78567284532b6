"""The common parts of both kinds of JobSet: program, configuration and host memory.

Each pod runs `elastic-ckpt train`. Its configuration is in a ConfigMap, so that one
image serves many runs, and a run can change its keys without a new image.
"""

from __future__ import annotations

from typing import Any

import yaml

from elastic_ckpt.config import keys, schema
from elastic_ckpt.core import topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.deploy import machine, names
from elastic_ckpt.manifests import failure_domains

Object = dict[str, Any]

# The volume with the configuration, its mount path, and the file in it.
_CONFIG = "config"
_CONFIG_DIRECTORY = "/etc/elastic-ckpt"
_CONFIG_FILE = "config.yml"
CONFIG_MOUNT = {"name": _CONFIG, "mountPath": _CONFIG_DIRECTORY, "readOnly": True}
CONTAINER = "train"
COMMAND = ("elastic-ckpt", "train", f"{_CONFIG_DIRECTORY}/{_CONFIG_FILE}")
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
    tiers = config.tiers
    if tiers.local_checkpoint_directory:
        path = tiers.local_checkpoint_directory
        names.check_mount("local_checkpoint_directory", path)
        size = tiers.local_checkpoint_size_limit
        names.check_size("local_checkpoint_size_limit", size)
    names.check_size("shared_memory_size_limit", deploy.shared_memory_size_limit)
    names.check_remote("base_output_directory", config.run.base_output_directory)
    host = machine.from_config(config)
    hosts = config.world.slices * host.hosts_per_slice
    devices = hosts * (host.devices or config.world.devices_per_host)
    world = topology.Topology(hosts=hosts, slices=config.world.slices, devices=devices)
    batch_size.schedule(config.data, world)
    return host


def metadata(config: schema.Config) -> Object:
    """The name and namespace of each object of a run."""
    return {"name": config.run.run_name, "namespace": config.deploy.namespace}


def config_volume(config: schema.Config) -> Object:
    """The volume with the configuration, which `CONFIG_MOUNT` mounts."""
    return {"name": _CONFIG, "configMap": {"name": config.run.run_name}}


def host_memory(config: schema.Config) -> tuple[list[Object], list[Object]]:
    """The volumes in a host's memory, and their mounts.

    They are the RAM disk, if configured, and the shared memory of its processes.
    """
    tiers = config.tiers
    ram_disk = (
        "local-checkpoints",
        tiers.local_checkpoint_directory,
        tiers.local_checkpoint_size_limit,
    )
    shared = ("dshm", "/dev/shm", config.deploy.shared_memory_size_limit)
    parts = [ram_disk, shared] if tiers.local_checkpoint_directory else [shared]
    volumes: list[Object] = [
        {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        for name, _, size in parts
    ]
    return volumes, [{"name": name, "mountPath": path} for name, path, _ in parts]


def environment() -> list[Object]:
    """The environment of a container: its pod's address and its failure domains.

    Since version 1.35 Kubernetes labels pods with the zone of their node (KEP 4742);
    in older versions the variable is empty and defines no domain.
    """
    fields = {
        "POD_IP": "status.podIP",
        "NODE_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
    }
    from_pod: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    domains: Object = {"name": failure_domains.VARIABLE, "value": "zone=$(NODE_ZONE)"}
    return [*from_pod, domains]


def config_map(config: schema.Config) -> Object:
    """The ConfigMap with every key whose value is not the default."""
    defaults = keys.values(schema.Config())
    chosen = {
        key: value
        for key, value in keys.values(config).items()
        # The JobSet determines the number of hosts.
        if value != defaults[key] and key != "hosts"
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config),
        "data": {_CONFIG_FILE: yaml.safe_dump(chosen, sort_keys=False, width=1000)},
    }
