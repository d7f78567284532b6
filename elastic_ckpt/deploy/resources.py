"""The CPUs and the memory that the container of our code requests.

The kernel counts the pages of a memory-backed volume as memory of the container that
wrote them, and Kubernetes ends a container above its limit. So the RAM disk, /dev/shm
and every other such volume that the container mounts are added to what the program
needs itself, and the scheduler places no other pod into their memory.
"""

from __future__ import annotations

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors
from elastic_ckpt.deploy import addition, machine, names, quantity, ram_disk

_BACKUP_MEMORY = "4Gi"


def check(config: schema.Config) -> None:
    """Raises a ConfigError if an amount of memory is none."""
    pods = config.pods
    for key in ("program_memory", "sidecar_memory"):
        value = getattr(pods, key)
        if value:
            names.check_size(key, value)


def addition_for(config: schema.Config, pods: addition.Pods) -> addition.Addition:
    """The requests and limits of the container, whose volumes are complete."""
    section = config.pods
    cpus, memory = section.program_cpus, section.program_memory
    if pods.role == "worker":
        cpus, memory = section.sidecar_cpus, section.sidecar_memory
    elif pods.role == "backup":
        # The memory of the program, besides its steps.
        cpus, memory = 0, _BACKUP_MEMORY
    requests: dict[str, str] = {}
    resources = {"requests": requests}
    if cpus:
        requests["cpu"] = quantity.of_cpus(cpus)
    total = sum(map(quantity.to_bytes, memory_volumes(config, pods).values()))
    if memory:
        total += quantity.to_bytes(memory)
        resources["limits"] = {"memory": quantity.of_bytes(total)}
    if total:
        requests["memory"] = quantity.of_bytes(total)
    if pods.role in ("host", "worker"):
        _check_fit(config, cpus, total)
    return addition.Addition(container={"resources": resources} if requests else {})


def _check_fit(config: schema.Config, cpus: float, memory_bytes: int) -> None:
    host, machine_type = machine.from_config(config), config.deploy.machine_type
    if host.memory_gib is not None and memory_bytes > host.memory_gib * 2**30:
        raise errors.ConfigError(
            f"a pod requests {quantity.of_bytes(memory_bytes)} of memory, that of its"
            f" program and of all volumes in memory, and machine_type={machine_type}"
            f" has {host.memory_gib}Gi; lower program_memory, sidecar_memory,"
            " local_checkpoint_size_limit or shared_memory_size_limit"
        )
    if host.cpus is not None and cpus > host.cpus:
        raise errors.ConfigError(
            f"a pod requests {cpus:g} CPUs, and machine_type={machine_type} has"
            f" {host.cpus}; lower program_cpus or sidecar_cpus"
        )


def memory_volumes(config: schema.Config, pods: addition.Pods) -> dict[str, str]:
    """The size of each memory-backed volume that the container mounts, by its name."""
    mounted = {mount["name"] for mount in pods.program().get("volumeMounts", [])}
    sizes = {
        volume["name"]: volume["emptyDir"]["sizeLimit"]
        for volume in pods.template["spec"].get("volumes", [])
        if volume["name"] in mounted
        and volume.get("emptyDir", {}).get("medium") == "Memory"
        and "sizeLimit" in volume["emptyDir"]
    }
    if ram_disk.VOLUME in mounted:
        # Also in a volume of the node the memory counts as that of the pod which wrote.
        sizes[ram_disk.VOLUME] = config.tiers.local_checkpoint_size_limit
    return sizes
