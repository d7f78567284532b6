"""The topology of a run: hosts, slices and devices, and the mesh over them.

The mesh from `mesh_of` has two axes: `slice`, the failure domain that joins and leaves
as a whole, and `fsdp`, the devices inside a slice over which parameters are sharded. A
batch is sharded over both. Users may pass a mesh of their own and specify the axes that
shard a batch. Only this module reads `jax.process_index()`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from elastic_ckpt.core import errors

SLICE_AXIS = "slice"
FSDP_AXIS = "fsdp"
BATCH_AXES = (SLICE_AXIS, FSDP_AXIS)
# Axes over which rows are sharded, unless the user passes a spec.
_ROW_AXES = frozenset({SLICE_AXIS, FSDP_AXIS, "batch", "data", "replica"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """How many hosts (processes), slices and devices a world has.

    A slice is a failure domain: whole hosts, or a simulated part of one host.
    """

    hosts: int
    slices: int
    devices: int

    def check(self) -> None:
        """Raises a ConfigError unless hosts and devices divide evenly into slices."""
        if self.hosts % self.slices and self.slices % self.hosts:
            raise errors.ConfigError(
                f"slices={self.slices}: {self.hosts} hosts cannot be divided evenly"
                f" among {self.slices} slices. A slice consists of whole hosts, or one"
                " host simulates whole slices; set slices to one of"
                f" {_divisors(self.hosts)}"
            )
        if self.devices % self.slices:
            raise errors.ConfigError(
                f"slices={self.slices}: {self.devices} devices cannot be divided"
                f" evenly among {self.slices} slices; set slices to one of"
                f" {_divisors(self.devices)}, or change devices_per_host"
            )


def this_host() -> int:
    """The index of this process in its world, from 0."""
    return jax.process_index()


def num_hosts() -> int:
    """The number of processes that control devices; 1 with a single controller."""
    return jax.process_count()


def slice_of_this_host(slices: int = 1) -> str:
    """This process's slice in the mesh from `mesh_of`.

    A host that simulates multiple slices counts as one slice. With `slices=1`, this is
    the hardware's slice.
    """
    hardware = _hardware_slice(jax.local_devices()[0])
    if hardware or slices == 1:
        return str(hardware)
    return str(this_host() * slices // num_hosts())


def slices_of(mesh: Mesh) -> dict[jax.Device, str]:
    """Each device's slice, from the mesh's slice axis or, without one, the hardware."""
    if SLICE_AXIS not in mesh.axis_names:
        return {device: str(_hardware_slice(device)) for device in mesh.devices.flat}
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(SLICE_AXIS), 0)
    return {
        device: str(number) for number, row in enumerate(rows) for device in row.flat
    }


def is_single_controller(mesh: Mesh) -> bool:
    """Whether this process is the only one and controls devices of other hosts.

    Under Pathways, JAX's platform is `proxy`.
    """
    if "proxy" in (jax.config.jax_platforms or ""):  # pyrefly: ignore
        return True
    owners = {device.process_index for device in mesh.devices.flat}
    return num_hosts() == 1 and owners != {this_host()}


def is_primary() -> bool:
    """Whether this process writes the files that exist once for all hosts."""
    return this_host() == 0


def present(slices: int, devices: Sequence[jax.Device] | None = None) -> Topology:
    """The topology of `devices` (by default all devices), split into `slices`."""
    devices = jax.devices() if devices is None else devices
    hosts = len({device.process_index for device in devices})
    return Topology(hosts=hosts, slices=slices, devices=len(devices))


def mesh_of(world: Topology, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A `[slices, devices per slice]` mesh over `devices` (by default all devices).

    On TPU, slices come from the hardware (`device.slice_index`). Elsewhere, the hosts
    are split into `slices` equal groups in host order.

    Raises:
      ConfigError: if the devices are not the devices of `world` or cannot be split this
        way.
    """
    devices = jax.devices() if devices is None else devices
    available = present(world.slices, devices)
    if available != world:
        raise errors.ConfigError(
            f"the devices form {available}, but the run's topology is {world}; pass a"
            " topology and devices that belong to the same world"
        )
    world.check()
    ordered = sorted(devices, key=lambda d: (_hardware_slice(d), d.process_index, d.id))
    grid = np.array(ordered).reshape(world.slices, -1)
    for number, row in enumerate(grid):
        crossed = sorted({_hardware_slice(device) for device in row})
        if len(crossed) > 1:
            raise errors.ConfigError(
                f"slices={world.slices} would put hardware slices {crossed} into slice"
                f" {number}; set slices to a multiple of the number of hardware slices"
            )
    return Mesh(grid, BATCH_AXES)


def batch_sharding(mesh: Mesh, spec: PartitionSpec | None = None) -> NamedSharding:
    """The sharding of a batch on `mesh`.

    Args:
      mesh: any mesh.
      spec: the axes that shard rows, then the axes that shard dim 1, and so on; the
        batch is replicated over all other axes. By default, rows are sharded over the
        only axis of the mesh, or over its axes named batch, data, fsdp, replica and
        slice, in mesh order.

    Raises:
      ConfigError: if `spec` does not match the mesh, or if `spec` is None and no mesh
        axis has one of these names.
    """
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    if spec is None:
        names = [name for name in mesh.axis_names if name in _ROW_AXES]
        if len(mesh.axis_names) > 1 and not names:
            raise errors.ConfigError(
                f"no mesh axis ({axes}) has one of the names {sorted(_ROW_AXES)}; list"
                " the axes that shard the rows of a batch, as in spec=PartitionSpec("
                f"{mesh.axis_names[0]!r})"
            )
        spec = PartitionSpec(tuple(names or mesh.axis_names))
    named = [name for entry in spec for name in axes_of(entry)]
    if len(named) > len(set(named)) or not set(named) <= set(mesh.axis_names):
        raise errors.ConfigError(
            f"spec={spec} does not match the mesh ({axes}); use only mesh axes, each"
            " at most once"
        )
    return NamedSharding(mesh, spec)


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def replica_axes(sharding: NamedSharding) -> tuple[Any, ...]:
    """The mesh axes with more than one device over which an array is replicated."""
    used = {axis for entry in sharding.spec for axis in axes_of(entry)}
    sizes = sharding.mesh.shape.items()
    return tuple(axis for axis, size in sizes if size > 1 and axis not in used)


def over_all_devices(mesh: Mesh) -> NamedSharding:
    """The sharding of an array with a row for each device, in mesh order."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device of `mesh` holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Moves `array` to a `sharding` under which every shard stays on its host.

    An array with an equivalent sharding is not moved. With multiple controllers, each
    host moves its own shards, because `jax.device_put` would first compare values
    across all hosts.
    """
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if array.is_fully_addressable:
        return jax.device_put(array, sharding)
    # Slices have no hash in Python 3.11.
    shards = {str(shard.index): shard.data for shard in array.addressable_shards}
    pieces = [
        jax.device_put(shards[str(index)], device)
        for device, index in sharding.addressable_devices_indices_map(
            array.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def _hardware_slice(device: jax.Device) -> int:
    # On CPU and single-slice devices, this attribute is missing or 0.
    return getattr(device, "slice_index", 0) or 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
