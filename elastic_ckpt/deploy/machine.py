"""GKE machine types: their accelerators, resource limits and node labels."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors

_TPU = "cloud.google.com/gke-tpu-accelerator"
_GPU = "cloud.google.com/gke-accelerator"
# The label of a node with its machine type.
INSTANCE = "node.kubernetes.io/instance-type"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of host, as a manifest specifies it.

    Attributes:
      node_selector: the labels of the nodes of this kind.
      limits: the resources of a host, which one pod takes.
      devices: JAX devices of a host; 0 if the configuration sets their number.
      hosts_per_slice: the number of hosts in a slice.
    """

    node_selector: dict[str, str]
    limits: dict[str, str]
    devices: int
    hosts_per_slice: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Accelerator:
    label: str
    chips: int
    devices_per_chip: int = 1


_TPUS = {
    "ct4p-hightpu-4t": _Accelerator(label="tpu-v4-podslice", chips=4),
    "ct5lp-hightpu-4t": _Accelerator(label="tpu-v5-lite-podslice", chips=4),
    "ct5lp-hightpu-8t": _Accelerator(label="tpu-v5-lite-podslice", chips=8),
    "ct5p-hightpu-4t": _Accelerator(label="tpu-v5p-slice", chips=4),
    "ct6e-standard-4t": _Accelerator(label="tpu-v6e-slice", chips=4),
    "ct6e-standard-8t": _Accelerator(label="tpu-v6e-slice", chips=8),
    "tpu7x-standard-4t": _Accelerator(label="tpu7x", chips=4, devices_per_chip=2),
}
_GPUS = {
    "a2-highgpu-8g": _Accelerator(label="nvidia-tesla-a100", chips=8),
    "a2-ultragpu-8g": _Accelerator(label="nvidia-a100-80gb", chips=8),
    "a3-highgpu-8g": _Accelerator(label="nvidia-h100-80gb", chips=8),
    "a3-megagpu-8g": _Accelerator(label="nvidia-h100-mega-80gb", chips=8),
    "a3-ultragpu-8g": _Accelerator(label="nvidia-h200-141gb", chips=8),
    "a4-highgpu-8g": _Accelerator(label="nvidia-b200", chips=8),
}


def from_config(config: schema.Config) -> Machine:
    """The kind of host that `config` requires.

    Raises:
      ConfigError: if the machine type is unknown, or the hosts do not divide into
        slices.
    """
    deploy, world = config.deploy, config.world
    if world.hardware == "tpu":
        tpu = _known(deploy.machine_type, _TPUS, "tpu")
        return Machine(
            node_selector={
                _TPU: tpu.label,
                "cloud.google.com/gke-tpu-topology": deploy.topology,
            },
            limits={"google.com/tpu": str(tpu.chips)},
            devices=tpu.chips * tpu.devices_per_chip,
            hosts_per_slice=_hosts_of_topology(deploy, tpu.chips),
        )
    if deploy.topology:
        raise errors.ConfigError(
            f"topology={deploy.topology} with hardware={world.hardware}: only TPU"
            " slices have a topology; leave it empty"
        )
    if world.hosts % world.slices:
        raise errors.ConfigError(
            f"hosts={world.hosts} do not divide into slices={world.slices}; set hosts,"
            " the hosts of all slices together, to a multiple"
        )
    selector, limits, devices = {}, {}, 0
    if world.hardware == "gpu":
        gpu = _known(deploy.machine_type, _GPUS, "gpu")
        selector, devices = {_GPU: gpu.label}, gpu.chips
        limits = {"nvidia.com/gpu": str(gpu.chips)}
    elif deploy.machine_type:
        selector = {INSTANCE: deploy.machine_type}
    return Machine(
        node_selector=selector,
        limits=limits,
        devices=devices,
        hosts_per_slice=world.hosts // world.slices,
    )


def _known(
    machine_type: str, machines: dict[str, _Accelerator], hardware: str
) -> _Accelerator:
    if machine_type not in machines:
        near = difflib.get_close_matches(machine_type, machines, n=1, cutoff=0.0)
        raise errors.ConfigError(
            f"machine_type={machine_type!r} is no machine with hardware={hardware}; the"
            f" nearest is {near[0]!r}; choose one of {', '.join(machines)}"
        )
    return machines[machine_type]


def _hosts_of_topology(deploy: schema.DeploySection, chips: int) -> int:
    # pathwaysutils counts the hosts of a slice in the same way.
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", deploy.topology):
        raise errors.ConfigError(
            f"topology={deploy.topology!r} is not that of a TPU slice; write its chips"
            " along each dimension, 4x4 or 2x2x4"
        )
    total = math.prod(int(length) for length in deploy.topology.split("x"))
    if total % chips:
        raise errors.ConfigError(
            f"topology={deploy.topology} has {total} chips, which is no multiple of the"
            f" {chips} chips of machine_type={deploy.machine_type}; choose the topology"
            " of the node pool"
        )
    return total // chips
