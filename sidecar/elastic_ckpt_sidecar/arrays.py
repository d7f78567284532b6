"""Maps the head's arrays to hosts and moves them to the hosts' memory and back.

Under a single controller, the head sees all shards as arrays but does not have their
bytes: `jax.device_put` between an accelerator and its host's CPU device moves bytes
only within the host.

All arrays of a call must be on the same devices, so leaves on the same mesh form a
group that a single call can pass. The group's mesh consists of the accelerators' CPU
devices, in the same order. The head's own values (numbers and NumPy arrays) form a
group of bytes on a device of host 0. A layout is a list of groups; it is sent once, and
later calls refer to it by number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from elastic_ckpt.checkpoint.host import capture, trees
from elastic_ckpt.checkpoint.host.capture import Shards
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import boxes, calls, errors
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.captured import Captured

# The maximum size of a group on a host. Groups pass through the host's memory one after
# another; JAX may still free one while the next is read. To be restored, a larger leaf
# is cut into parts, each of them a group.
GROUP_BYTES = 2**27
# The axis of a one-device mesh.
_ONE = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedLeaf:
    """A leaf of a group, or a part of a leaf.

    Attributes:
      path: the path in the tree.
      whole: the shape of the whole leaf.
      part: the part of each of the leaf's shards that belongs to this one.
      shape: the shape of the array whose shards are these parts.
      dtype: the dtype name; None means the saved dtype.
      spec: the sharding over the group's mesh; None for the head's own values.
    """

    path: str
    whole: tuple[int, ...]
    part: boxes.Box
    shape: tuple[int, ...]
    dtype: str | None
    spec: tuple[str | tuple[str, ...] | None, ...] | None

    def on(self, mesh: Mesh) -> NamedSharding:
        """The leaf's sharding on the group's mesh."""
        return NamedSharding(mesh, PartitionSpec(*(self.spec or ())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves on the same mesh of CPU devices, in the order of their arrays."""

    mesh: Mesh
    leaves: tuple[PlacedLeaf, ...]

    def abstract(
        self, leaf: PlacedLeaf, dtypes: Mapping[str, str]
    ) -> jax.ShapeDtypeStruct:
        """Returns the abstract array of a leaf, as bytes for the head's own values.

        `dtypes` maps paths to saved dtypes.
        """
        dtype = np.dtype(leaf.dtype or dtypes[leaf.path])
        shape = leaf.shape
        if leaf.spec is None:
            shape, dtype = (math.prod(shape) * dtype.itemsize,), np.dtype(np.uint8)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=leaf.on(self.mesh))

    def beside(self, values: Sequence[Any]) -> list[jax.Array]:
        """Moves a group's values to the CPU devices of their hosts."""
        given = [
            value
            if leaf.spec is not None
            # Bytes are in this machine's byte order, as in the files.
            else np.frombuffer(
                np.asarray(value, np.dtype(leaf.dtype)).tobytes(), np.uint8
            )
            for leaf, value in zip(self.leaves, values, strict=True)
        ]
        return jax.device_put(given, [leaf.on(self.mesh) for leaf in self.leaves])

    def restored(
        self,
        arrays: Sequence[jax.Array],
        asked: Sequence[trees.AskedLeaf],
        dtypes: Mapping[str, str],
    ) -> Sequence[Any]:
        """Moves a group's arrays from CPU devices to where the `asked` leaves belong.

        `dtypes` maps paths to saved dtypes.
        """
        if self.leaves[0].spec is None:
            return [
                np.array(array)
                .view(leaf.dtype or dtypes[leaf.path])
                .reshape(leaf.shape)
                for leaf, array in zip(self.leaves, arrays, strict=True)
            ]
        # One call, so that the transfers overlap.
        return jax.device_put(list(arrays), [leaf.sharding for leaf in asked])

    def describe(self) -> GroupDescription:
        """Returns the group without its devices, for a message."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return GroupDescription(
            device_ids=tuple(ids.ravel().tolist()),
            shape=ids.shape,
            axes=tuple(self.mesh.axis_names),
            leaves=self.leaves,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupDescription:
    """A group with its mesh's row-major device IDs, shape and axis names."""

    device_ids: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    leaves: tuple[PlacedLeaf, ...]

    def group(self, devices: Mapping[int, jax.Device]) -> Group:
        """Returns the group, given the devices by ID."""
        grid = np.empty(len(self.device_ids), object)
        grid[:] = [devices[number] for number in self.device_ids]
        return Group(mesh=Mesh(grid.reshape(self.shape), self.axes), leaves=self.leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostDevices:
    """The accelerators of a host, and the CPU device for each."""

    accelerators: tuple[jax.Device, ...]
    cpus: tuple[jax.Device, ...]


class HeadArrays:
    """Maps leaves to the CPU devices of hosts.

    Args:
      hosts: the devices of all hosts, in host order.
      group_bytes: see `GROUP_BYTES`.
    """

    def __init__(
        self, hosts: Sequence[HostDevices], *, group_bytes: int = GROUP_BYTES
    ) -> None:
        self._most_bytes = group_bytes // max(len(host.cpus) for host in hosts)
        self._beside = {
            accelerator: cpu
            for host in hosts
            for accelerator, cpu in zip(host.accelerators, host.cpus, strict=True)
        }
        # The mesh of the head's own values.
        self._first = Mesh(np.array([hosts[0].cpus[0]]), (_ONE,))
        # False in a run on CPUs, where the "accelerators" are themselves CPU devices.
        self.apart = not set(self._beside) & set(self._beside.values())

    def to_save(
        self, leaves: Mapping[str, Any]
    ) -> tuple[tuple[Group, ...], list[list[Any]]]:
        """The groups of leaves to save, and the values of each group.

        Raises:
          CheckpointError: if a leaf cannot be saved. The message includes its path.
        """
        values = {path: capture.numbers(leaves[path]) for path in sorted(leaves)}
        return self._grouped(
            (
                capture.leaf_of(path, value),
                value.sharding if isinstance(value, jax.Array) else None,
                value,
            )
            for path, value in values.items()
        )

    def to_restore(
        self, asked: Sequence[trees.AskedLeaf]
    ) -> tuple[tuple[Group, ...], list[list[trees.AskedLeaf]]]:
        """The groups of leaves to restore, and the leaves of each group."""
        leaves = ((leaf, leaf.sharding, leaf) for leaf in asked)
        return self._grouped(leaves, cut=self.apart)

    def _grouped(
        self,
        leaves: Iterable[tuple[Leaf | trees.AskedLeaf, Sharding | None, Any]],
        *,
        cut: bool = False,
    ) -> tuple[tuple[Group, ...], list[list[Any]]]:
        # The head's own values form separate groups, even from leaves on host 0.
        groups_of: dict[tuple[Mesh, bool, int], list[tuple[PlacedLeaf, Any]]] = {}
        last: dict[tuple[Mesh, bool], tuple[int, int]] = {}
        for leaf, sharding, value in leaves:
            mesh, spec = self._place(leaf.path, sharding)
            dtype = None if leaf.dtype is None else np.dtype(leaf.dtype).name
            whole = tuple(leaf.shape)
            shard = NamedSharding(mesh, PartitionSpec(*(spec or ()))).shard_shape(whole)
            # Assumes the widest dtype while the saved dtype is unknown.
            item_bytes = np.dtype(dtype or np.float64).itemsize
            # Parts are joined in the accelerators' own memory.
            kind = sharding.memory_kind if sharding else "head"
            can_join = kind in (None, "device")
            most_bytes = self._most_bytes if cut and can_join else math.inf
            for part in _parts(shard, item_bytes, most_bytes):
                sizes = zip(whole, shard, part.shape, strict=True)
                placed = PlacedLeaf(
                    path=leaf.path,
                    whole=whole,
                    part=part,
                    shape=tuple(n // max(1, size) * some for n, size, some in sizes),
                    dtype=dtype,
                    spec=spec,
                )
                num_bytes = item_bytes * part.volume
                number, before = last.get((mesh, spec is None), (0, 0))
                if before and before + num_bytes > self._most_bytes:
                    number, before = number + 1, 0
                last[mesh, spec is None] = number, before + num_bytes
                groups_of.setdefault((mesh, spec is None, number), []).append(
                    (placed, value)
                )
        groups = tuple(
            Group(mesh=mesh, leaves=tuple(leaf for leaf, _ in members))
            for (mesh, _, _), members in groups_of.items()
        )
        return groups, [
            [value for _, value in members] for members in groups_of.values()
        ]

    def _place(
        self, path: str, sharding: Sharding | None
    ) -> tuple[Mesh, tuple[Any, ...] | None]:
        if sharding is None:
            return self._first, None
        strange = sharding.device_set - self._beside.keys()
        if strange:
            raise errors.CheckpointError(
                f"leaf {path!r} is on {sorted(map(str, strange))}, which are not in"
                " this checkpointer's mesh; create the checkpointer with the mesh of"
                " the whole run"
            )
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return Mesh(np.array([self._beside[device]]), (_ONE,)), ()
        if not isinstance(sharding, NamedSharding):
            raise errors.CheckpointError(
                f"leaf {path!r} has a sharding of type {type(sharding).__name__}, which"
                " cannot be sent to other hosts; use a NamedSharding"
            )
        grid = np.vectorize(self._beside.__getitem__, otypes=[object])(
            sharding.mesh.devices
        )
        return Mesh(grid, sharding.mesh.axis_names), tuple(sharding.spec)


class HostArrays:
    """One host's arrays, for the calls of saves and restores.

    A save calls `hold` for each group, then `capture`; a restore calls `select`, then
    `read` and `made` for each group. So only one group at a time is in the memory of
    the CPU devices.

    Args:
      saver: the host's saver.
      reader: the host's reader.
      host: this host's index.
      host_of: a dict from CPU device ID to host index.
      devices: all CPU devices of the world, by ID.
    """

    def __init__(
        self,
        saver: HostSaver,
        reader: HostReader,
        *,
        host: int,
        host_of: Mapping[int, int],
        devices: Mapping[int, jax.Device],
    ) -> None:
        self._saver = saver
        self._reader = reader
        self._host, self._host_of = host, host_of
        self._devices = devices
        self._layouts: dict[int, list[Group]] = {}
        self._boxes: dict[int, dict[PlacedLeaf, dict[boxes.Box, int]]] = {}
        self._holders: dict[tuple[int, str], dict[boxes.Box, tuple[int, ...]]] = {}
        # The groups held so far, by layout and group, until `capture`.
        self._captured: dict[tuple[int, int], Captured] = {}
        self._dtypes: dict[str, str] = {}

    @calls.call()
    def describe(self, layout: int, groups: tuple[GroupDescription, ...]) -> None:
        """Receives a layout, which later calls refer to by its number."""
        known = [each.group(self._devices) for each in groups]
        self._boxes[layout] = {
            leaf: self._boxes_of(group, leaf)
            for group in known
            for leaf in group.leaves
        }
        self._layouts[layout] = known

    def hold(
        self, layout: int, group: int, arrays: Sequence[jax.Array], *, kept: bool
    ) -> None:
        """Holds this host's shards of a group's arrays, without a copy if `kept`.

        No other code may change `kept` arrays.
        """
        members = self._layouts[layout][group]
        shards = {}
        for leaf, array in zip(members.leaves, arrays, strict=True):
            held = {shard.device.id: shard.data for shard in array.addressable_shards}
            shards[leaf.path] = self._shards(layout, members, leaf, held, kept=kept)
        captured = self._saver.captured(shards)
        if (layout, group) in self._captured:
            # Left by a failed save.
            self._captured[layout, group].release()
        self._captured[layout, group] = captured

    @calls.call()
    def capture(self, step_id: StepId, layout: int) -> str:
        """Starts saving the held arrays; see `Hosts.capture`."""
        groups = self._layouts[layout]
        held, self._captured = self._captured, {}
        # Includes the leaves that are only on other hosts.
        elsewhere = {
            leaf.path: self._shards(layout, group, leaf, {}, kept=True)
            for number, group in enumerate(groups)
            if (layout, number) not in held
            for leaf in group.leaves
        }
        for key in [key for key in held if key[0] != layout]:
            held.pop(key).release()
        several = [*held.values(), self._saver.captured(elsewhere)]
        return self._saver.begin(step_id, Captured.joined(several)).directory

    @calls.call()
    def select(self, layout: int, components: tuple[str, ...]) -> dict[str, str]:
        """Selects components of the open step, and this host's boxes of a layout.

        Returns:
          The saved dtypes of leaves that are requested without a dtype.

        Raises:
          CheckpointError: if the step lacks a leaf or component.
        """
        leaves = [leaf for group in self._layouts[layout] for leaf in group.leaves]
        saved = self._reader.select(
            [_wanted(leaf, self._boxes[layout][leaf]) for leaf in leaves],
            components,
        )
        self._dtypes = {
            leaf.path: saved[leaf.path] for leaf in leaves if leaf.dtype is None
        }
        return self._dtypes

    @calls.call(limit_secs=calls.LONG_SECS)
    def read(self, layout: int, group: int) -> None:
        """Reads and verifies this host's boxes of a group; see `HostReader.read`."""
        *before, now = self._layouts[layout][: group + 1]
        first = sum(len(each.leaves) for each in before)
        self._reader.read_leaves(slice(first, first + len(now.leaves)))

    def abstract(self, layout: int, group: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the abstract arrays of a requested group."""
        members = self._layouts[layout][group]
        return [members.abstract(leaf, self._dtypes) for leaf in members.leaves]

    def made(self, layout: int, group: int) -> list[list[jax.Array]]:
        """Puts the values read for each leaf on this host's devices."""
        members = self._layouts[layout][group]
        values = self._reader.made()
        return [
            self._on_devices(members, leaf, values[leaf.path])
            for leaf in members.leaves
        ]

    def _boxes_of(self, group: Group, leaf: PlacedLeaf) -> dict[boxes.Box, int]:
        # Each local box that is not empty, and the first device with it.
        first: dict[boxes.Box, int] = {}
        for device, box in self._device_boxes(group, leaf):
            if box.volume:
                first.setdefault(box, device.id)
        return first

    def _device_boxes(
        self, group: Group, leaf: PlacedLeaf
    ) -> list[tuple[jax.Device, boxes.Box]]:
        # Of the whole leaf.
        here = leaf.on(group.mesh).addressable_devices_indices_map(leaf.whole)
        return [
            (device, leaf.part.within(boxes.of_index(index or (), leaf.whole)))
            for device, index in here.items()
            if self._host_of[device.id] == self._host
        ]

    def _shards(
        self,
        layout: int,
        group: Group,
        leaf: PlacedLeaf,
        held: Mapping[int, jax.Array],
        *,
        kept: bool,
    ) -> Shards:
        # `held`, by device ID, is empty if this host does not have boxes of the leaf.
        assert leaf.dtype is not None
        dtype = np.dtype(leaf.dtype)
        listed = []
        for box, device in self._boxes[layout][leaf].items():
            values = np.asarray(held[device])
            if leaf.spec is None:
                values = values.view(dtype).reshape(leaf.shape)
            listed.append((box, values))
        return Shards(
            leaf=Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype),
            shard_shape=leaf.on(group.mesh).shard_shape(leaf.shape),
            boxes=tuple(listed),
            kept=kept,
            holders=lambda box: self._holders_of(layout, group, leaf)[box],
        )

    def _holders_of(
        self, layout: int, group: Group, leaf: PlacedLeaf
    ) -> dict[boxes.Box, tuple[int, ...]]:
        # The hosts of each box.
        key = (layout, leaf.path)
        if key not in self._holders:
            devices_of = boxes.devices_by_box(leaf.on(group.mesh), leaf.shape)
            self._holders[key] = {
                box: tuple(sorted({self._host_of[each.id] for each in devices}))
                for box, devices in devices_of.items()
            }
        return self._holders[key]

    def _on_devices(
        self, group: Group, leaf: PlacedLeaf, values: Mapping[boxes.Box, np.ndarray]
    ) -> list[jax.Array]:
        made = []
        for device, box in self._device_boxes(group, leaf):
            # No values are read for an empty box.
            part = values.get(box, np.empty(box.shape, leaf.dtype))
            if leaf.spec is None:
                part = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            # Keeps 64-bit dtypes, even if this process disables them.
            with jax.enable_x64(True):
                made.append(jax.device_put(part, device))
        return made


def _wanted(leaf: PlacedLeaf, needed: Mapping[boxes.Box, int]) -> trees.WantedLeaf:
    return trees.WantedLeaf(
        path=leaf.path,
        shape=leaf.whole,
        boxes=tuple(needed),
        place=lambda _, values: trees.cast(
            leaf.path, values, leaf.dtype or values.dtype
        ),
        join=lambda placed: dict(zip(needed, placed, strict=True)),
    )


def _parts(
    shard: tuple[int, ...], item_bytes: int, most_bytes: float
) -> Iterator[boxes.Box]:
    # Cuts a larger shard in the first dim in which one row is small enough.
    num_bytes = item_bytes * math.prod(shard)
    fits = (dim for dim, size in enumerate(shard) if size * most_bytes >= num_bytes)
    if num_bytes <= most_bytes:
        yield boxes.whole(shard)
        return
    part, dim = [slice(None)] * len(shard), next(fits, 0)
    rows = max(1, int(most_bytes * shard[dim] // num_bytes))
    for first in range(0, shard[dim], rows):
        part[dim] = slice(first, first + rows)
        yield boxes.of_index(part, shard)


def joined(leaf: trees.AskedLeaf, parts: Mapping[boxes.Box, jax.Array]) -> jax.Array:
    """Joins a leaf's parts on the devices that have its shards."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    sharding: Any = leaf.sharding

    def join(*arrays: jax.Array) -> jax.Array:
        shard = jnp.empty(sharding.shard_shape(leaf.shape), arrays[0].dtype)
        for part, array in zip(parts, arrays, strict=True):
            shard = jax.lax.dynamic_update_slice(shard, array, part.start)
        return shard

    on = sharding
    if isinstance(sharding, SingleDeviceSharding):
        on = NamedSharding(Mesh([*sharding.device_set], (_ONE,)), PartitionSpec())
    # Nothing moves between devices.
    with jax.set_mesh(on.mesh), jax.enable_x64(True):
        joins = jax.shard_map(
            join, in_specs=on.spec, out_specs=on.spec, check_vma=False
        )
        return jax.jit(joins, out_shardings=sharding)(*parts.values())
