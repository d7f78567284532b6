"""The head's side of arrays: which lie where, and moved to the hosts' memory and back.

Under a single controller all shards are arrays to the head, and none of their bytes:
`jax.device_put` between an accelerator and the CPU device beside it stays on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from elastic_ckpt.checkpoint.host import capture, trees
from elastic_ckpt.core import errors
from elastic_ckpt_sidecar.array_layout import Group, PlacedLeaf

# Of a group of leaves on a host: as much passes through its memory at a time.
GROUP_BYTES = 2**28
# The axis of a mesh of one device.
_ONE = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostDevices:
    """The devices of a host.

    Attributes:
      accelerators: whose arrays are saved.
      cpus: the CPU device beside each.
    """

    accelerators: tuple[jax.Device, ...]
    cpus: tuple[jax.Device, ...]


class HeadArrays:
    """Maps leaves to the CPU devices of hosts.

    Args:
      hosts: in the order of their numbers.
      group_bytes: the most of a group on a host, unless a leaf has more.
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
        # The head's own values go there.
        self._first = Mesh(np.array([hosts[0].cpus[0]]), (_ONE,))
        # Whether the CPU devices are other ones, as they are beside an accelerator.
        self.apart = not set(self._beside) & set(self._beside.values())

    def to_save(
        self, leaves: Mapping[str, Any]
    ) -> tuple[tuple[Group, ...], list[list[Any]]]:
        """The groups of some leaves, and the values of each group.

        Raises:
          CheckpointError: if a leaf cannot be saved; it names the leaf.
        """
        placed = []
        for path in sorted(leaves):
            value = capture.numbers(leaves[path])
            leaf = capture.leaf_of(path, value)
            sharding = value.sharding if isinstance(value, jax.Array) else None
            placed.append(
                (*self._placed(path, leaf.shape, leaf.dtype, sharding), value)
            )
        return _grouped(placed, self._most_bytes)

    def to_restore(
        self, asked: Sequence[trees.AskedLeaf]
    ) -> tuple[tuple[Group, ...], list[list[trees.AskedLeaf]]]:
        """The groups of leaves that are wanted, and the leaves of each group."""
        return _grouped(
            [
                (
                    *self._placed(
                        leaf.path,
                        leaf.shape,
                        None if leaf.dtype is None else np.dtype(leaf.dtype).name,
                        leaf.sharding,
                    ),
                    leaf,
                )
                for leaf in asked
            ],
            self._most_bytes,
        )

    def _placed(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: str | None,
        sharding: Sharding | None,
    ) -> tuple[Mesh, PlacedLeaf]:
        mesh, spec = self._first, None
        if sharding is not None:
            mesh, spec = self._mesh(path, sharding)
        return mesh, PlacedLeaf(path=path, shape=tuple(shape), dtype=dtype, spec=spec)

    def _mesh(self, path: str, sharding: Sharding) -> tuple[Mesh, tuple[Any, ...]]:
        strange = sharding.device_set - self._beside.keys()
        if strange:
            raise errors.CheckpointError(
                f"leaf {path!r} is on {sorted(map(str, strange))}, and this"
                " checkpointer is over other devices; give it the mesh of the whole run"
            )
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            return Mesh(np.array([self._beside[device]]), (_ONE,)), ()
        if not isinstance(sharding, NamedSharding):
            raise errors.CheckpointError(
                f"leaf {path!r} has a {type(sharding).__name__}, which cannot be sent"
                " to other hosts; put it under a NamedSharding"
            )
        grid = np.vectorize(self._beside.__getitem__, otypes=[object])(
            sharding.mesh.devices
        )
        return Mesh(grid, sharding.mesh.axis_names), tuple(sharding.spec)


def beside(group: Group, values: Sequence[Any]) -> list[jax.Array]:
    """The values of a group on the CPU devices of their hosts."""
    given = [
        value
        if leaf.spec is not None
        # In this machine's byte order, which is that of the files.
        else np.frombuffer(np.asarray(value, np.dtype(leaf.dtype)).tobytes(), np.uint8)
        for leaf, value in zip(group.leaves, values, strict=True)
    ]
    return jax.device_put(given, [group.sharding(leaf) for leaf in group.leaves])


def restored(
    group: Group,
    arrays: Sequence[jax.Array],
    asked: Sequence[trees.AskedLeaf],
    dtypes: Mapping[str, str],
) -> dict[str, Any]:
    """The leaves of a group, of its arrays on CPU devices, by path.

    Args:
      group: of them.
      arrays: one a leaf.
      asked: the leaves that are wanted.
      dtypes: by path, those in which leaves were saved.
    """
    values: Sequence[Any]
    if group.leaves[0].spec is None:
        values = [
            np.array(array).view(leaf.dtype or dtypes[leaf.path]).reshape(leaf.shape)
            for leaf, array in zip(group.leaves, arrays, strict=True)
        ]
    else:
        # All at once: transfers of many arrays go on at the same time.
        values = jax.device_put(list(arrays), [leaf.sharding for leaf in asked])
    return {
        leaf.path: leaf.finish(value) for leaf, value in zip(asked, values, strict=True)
    }


def _grouped(
    placed: Sequence[tuple[Mesh, PlacedLeaf, Any]], most_bytes: int
) -> tuple[tuple[Group, ...], list[list[Any]]]:
    # The head's own values make separate groups, also beside leaves of host 0. A group
    # has at most so many bytes on a device, unless a leaf has more.
    groups_of: dict[tuple[Mesh, bool, int], list[tuple[PlacedLeaf, Any]]] = {}
    last: dict[tuple[Mesh, bool], tuple[int, int]] = {}
    for mesh, leaf, value in placed:
        kind = mesh, leaf.spec is None
        number, before = last.get(kind, (0, 0))
        num_bytes = _bytes_of_device(mesh, leaf)
        if before and before + num_bytes > most_bytes:
            number, before = number + 1, 0
        last[kind] = number, before + num_bytes
        groups_of.setdefault((*kind, number), []).append((leaf, value))
    groups = tuple(
        Group(mesh=mesh, leaves=tuple(leaf for leaf, _ in members))
        for (mesh, _, _), members in groups_of.items()
    )
    return groups, [[value for _, value in members] for members in groups_of.values()]


def _bytes_of_device(mesh: Mesh, leaf: PlacedLeaf) -> int:
    # In the widest dtype, where it is not known yet.
    item_bytes = np.dtype(leaf.dtype or np.float64).itemsize
    sharding = NamedSharding(mesh, PartitionSpec(*(leaf.spec or ())))
    return math.prod(sharding.shard_shape(leaf.shape)) * item_bytes
