"""The kind of host that a run requires, by the machine types of `clouds.yaml`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import names, template
from elastic_ckpt.training import schema

_TPU = "cloud.google.com/gke-tpu-accelerator"
_GPU = "cloud.google.com/gke-accelerator"
# The label of a node with its machine type.
_INSTANCE = "node.kubernetes.io/instance-type"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of host, as a manifest specifies it.

    Attributes:
      node_selector: the labels of the nodes of this kind.
      limits: the resources of a host, which one pod takes.
      devices: JAX devices of a host; 0 if the configuration sets their number.
      hosts_per_slice: the number of hosts in a slice.
      cpus: of a host; None if they are not known.
      memory_gib: of a host; None if it is not known.
    """

    node_selector: dict[str, str]
    limits: dict[str, str]
    devices: int
    hosts_per_slice: int
    cpus: int | None = None
    memory_gib: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Accelerator:
    label: str
    chips: int
    cpus: int
    memory_gib: int
    devices_per_chip: int = 1
    # Of slices; none of GPUs.
    topologies: tuple[str, ...] = ()


def _known(kind: str) -> dict[str, _Accelerator]:
    machines = template.read("clouds.yaml")[kind]["machines"]
    return {name: _Accelerator(**fields) for name, fields in machines.items()}


_TPUS, _GPUS = _known("tpus"), _known("gpus")
_CUBIC = template.read("clouds.yaml")["tpus"]["cubic"]


def from_config(config: schema.Config) -> Machine:
    """The kind of host that `config` requires.

    Raises:
      ConfigError: if the machine type is unknown, or the hosts do not divide into
        slices.
    """
    deploy, world = config.deploy, config.world
    names.refuse(
        deploy.machine_gpus and world.hardware != "gpu",
        f"machine_gpus={deploy.machine_gpus} with hardware={world.hardware}: only"
        " pods with hardware=gpu take GPUs; leave it out",
    )
    if world.hardware == "tpu":
        tpu = _chosen(deploy.machine_type, _TPUS, "tpu")
        hosts_per_slice = _hosts_of_topology(deploy, tpu)
        names.refuse(
            world.hosts not in (1, hosts_per_slice * world.slices),
            f"hosts={world.hosts}, but slices={world.slices} of"
            f" topology={deploy.topology} have {hosts_per_slice * world.slices}"
            f" hosts with machine_type={deploy.machine_type}; leave hosts out",
        )
        return Machine(
            node_selector={
                _TPU: tpu.label,
                "cloud.google.com/gke-tpu-topology": deploy.topology,
            },
            limits={"google.com/tpu": str(tpu.chips)},
            devices=tpu.chips * tpu.devices_per_chip,
            hosts_per_slice=hosts_per_slice,
            cpus=tpu.cpus,
            memory_gib=tpu.memory_gib,
        )
    names.refuse(
        deploy.topology,
        f"topology={deploy.topology} with hardware={world.hardware}: only TPU"
        " slices have a topology; leave it empty",
    )
    names.refuse(
        world.hosts % world.slices,
        f"hosts={world.hosts} cannot be divided evenly among"
        f" slices={world.slices}; set hosts, which counts those of all slices, to a"
        " multiple of slices",
    )
    gpus, gpu = deploy.machine_gpus, None
    is_known = deploy.machine_type in _GPUS
    if world.hardware == "gpu" and (is_known or not gpus):
        gpu = _chosen(deploy.machine_type, _GPUS, "gpu")
        names.refuse(
            gpus > gpu.chips,
            f"machine_gpus={gpus} with machine_type={deploy.machine_type}, which has"
            f" {gpu.chips} GPUs; set machine_gpus to at most {gpu.chips}",
        )
        gpus = gpus or gpu.chips
        selector = {_GPU: gpu.label}
    else:
        selector = {_INSTANCE: deploy.machine_type} if deploy.machine_type else {}
    return Machine(
        node_selector=selector,
        limits={deploy.gpu_resource: str(gpus)} if gpus else {},
        devices=gpus,
        hosts_per_slice=world.hosts // world.slices,
        cpus=gpu.cpus if gpu else None,
        memory_gib=gpu.memory_gib if gpu else None,
    )


def _chosen(
    machine_type: str, machines: dict[str, _Accelerator], hardware: str
) -> _Accelerator:
    if machine_type not in machines:
        # The name of its accelerator, such as h100, says more than what looks alike.
        named = re.findall(r"[a-z]+\d+[a-z]*", machine_type.lower())
        near = [
            name
            for name, each in machines.items()
            if any(word in each.label.split("-") for word in named)
        ] or difflib.get_close_matches(machine_type, machines, n=1, cutoff=0.0)
        other = (
            ""
            if hardware == "tpu"
            else ", or set machine_gpus to the number of GPUs of another machine"
        )
        raise errors.ConfigError(
            f"machine_type={machine_type!r} is not a known machine type for"
            f" hardware={hardware}; did you mean {near[0]!r}? Choose one of"
            f" {', '.join(machines)}{other}"
        )
    return machines[machine_type]


def _hosts_of_topology(deploy: schema.DeploySection, tpu: _Accelerator) -> int:
    # pathwaysutils counts the hosts of a slice in the same way.
    topology = deploy.topology
    names.refuse(
        not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology),
        f"topology={topology!r} is not that of a TPU slice; write its chips along"
        " each dimension, 4x4 or 2x2x4",
    )
    lengths = [int(length) for length in topology.split("x")]
    is_of_cubes = (
        tpu.topologies == _CUBIC
        and len(lengths) == 3
        and lengths == sorted(lengths)
        and not any(length % 4 for length in lengths)
    )
    if not is_of_cubes and topology not in tpu.topologies:
        known = ", ".join(tpu.topologies)
        larger = (
            ", 4x4x4, or a larger one of multiples of 4 in ascending order"
            if tpu.topologies == _CUBIC
            else ""
        )
        raise errors.ConfigError(
            f"topology={topology} does not exist for"
            f" machine_type={deploy.machine_type}, whose slices have {known}{larger};"
            " choose the topology of the node pool"
        )
    return math.prod(lengths) // tpu.chips
