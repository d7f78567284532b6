"""What both kinds of JobSet have in common: the program, its files, its host memory.

The program of a pod is `elastic-ckpt train`. Its configuration travels in a ConfigMap,
so that an image serves many runs, and a run changes its keys without a new image.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from elastic_ckpt.config import keys, schema
from elastic_ckpt.core import topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.deploy import machine, names
from elastic_ckpt.manifests import failure_domains

Object = dict[str, Any]

# Of the volume with the configuration, where it is mounted, and the file in it.
CONFIG = "config"
CONFIG_DIRECTORY = "/etc/elastic-ckpt"
_CONFIG_FILE = "config.yml"
CONTAINER = "train"
COMMAND = ("elastic-ckpt", "train", f"{CONFIG_DIRECTORY}/{_CONFIG_FILE}")
# The label of a GKE node that names its node pool.
NODE_POOL = "cloud.google.com/gke-nodepool"
# A container without a message of its own shows the end of its log when it fails.
TERMINATION_MESSAGE_POLICY = "FallbackToLogsOnError"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """A part of a host's memory that a container sees as a directory.

    Attributes:
      name: of the volume.
      path: where it is mounted.
      size_limit: the most that it may hold.
    """

    name: str
    path: str
    size_limit: str


def check(config: schema.Config) -> machine.Machine:
    """The hosts of the run, if it could start on them.

    Raises:
      ConfigError: if a value is invalid, or the hosts cannot share the batches.
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
    of_hosts = machine.of(config)
    hosts = config.world.slices * of_hosts.hosts_per_slice
    devices = hosts * (of_hosts.devices or config.world.devices_per_host)
    world = topology.Topology(hosts=hosts, slices=config.world.slices, devices=devices)
    batch_size.schedule(config.data, world)
    return of_hosts


def host_memory(config: schema.Config) -> list[Memory]:
    """The RAM disk, if there is one, and the memory that a host's processes share."""
    size = config.deploy.shared_memory_size_limit
    shared = Memory(name="dshm", path="/dev/shm", size_limit=size)
    tiers = config.tiers
    if not tiers.local_checkpoint_directory:
        return [shared]
    ram_disk = Memory(
        name="local-checkpoints",
        path=tiers.local_checkpoint_directory,
        size_limit=tiers.local_checkpoint_size_limit,
    )
    return [ram_disk, shared]


def environment() -> list[Object]:
    """The variables of a container: its pod's address, and its failure domains.

    Kubernetes gives pods the zone of their node from 1.35 on (KEP 4742); where it does
    not, the variable is empty, and no domain.
    """
    fields = {
        "POD_IP": "status.podIP",
        "NODE_ZONE": "metadata.labels['topology.kubernetes.io/zone']",
    }
    found: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    return [*found, {"name": failure_domains.VARIABLE, "value": "zone=$(NODE_ZONE)"}]


def config_map(config: schema.Config) -> Object:
    """The ConfigMap with every key that is not at its default."""
    defaults = keys.values(schema.Config())
    chosen = {
        key: value
        for key, value in keys.values(config).items()
        # The hosts are those that the JobSet starts.
        if value != defaults[key] and key != "hosts"
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config.run.run_name,
            "namespace": config.deploy.namespace,
        },
        "data": {_CONFIG_FILE: yaml.safe_dump(chosen, sort_keys=False, width=1000)},
    }
