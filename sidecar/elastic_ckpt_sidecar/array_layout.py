"""Array layouts: which leaves of a state are on which devices, for head and hosts.

Leaves over one mesh make a group: its arrays can be handed over in one call, since all
arrays of a call have to lie on the same devices. The mesh is that of the CPU devices
beside the accelerators, in the same order. The head's own values, numbers and arrays of
NumPy, are a group too: of bytes, on a device of host 0.

A layout is sent once. Later calls name it by a number, however many leaves it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedLeaf:
    """A leaf of a group.

    Attributes:
      path: of the leaf.
      shape: of the whole array.
      dtype: its name; None stands for that in which it was saved.
      spec: over the axes of the group's mesh; None for the head's own values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str | None
    spec: tuple[str | tuple[str, ...] | None, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves over one mesh.

    Attributes:
      mesh: of CPU devices of hosts.
      leaves: in the order of their arrays.
    """

    mesh: Mesh
    leaves: tuple[PlacedLeaf, ...]

    def sharding(self, leaf: PlacedLeaf) -> NamedSharding:
        """Returns the sharding of a leaf's array on the CPU devices."""
        return NamedSharding(self.mesh, PartitionSpec(*(leaf.spec or ())))

    def abstract(
        self, leaf: PlacedLeaf, dtypes: Mapping[str, str]
    ) -> jax.ShapeDtypeStruct:
        """Returns the array of a leaf; for the head's own values, that of its bytes.

        Args:
          leaf: of this group.
          dtypes: by path, those in which leaves were saved.
        """
        dtype = np.dtype(leaf.dtype or dtypes[leaf.path])
        shape = leaf.shape
        if leaf.spec is None:
            shape, dtype = (math.prod(shape) * dtype.itemsize,), np.dtype(np.uint8)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(leaf))

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
    """A group, with devices named by their ids.

    Attributes:
      device_ids: of the mesh, in row-major order.
      shape: of the mesh.
      axes: of the mesh.
      leaves: as in `Group`.
    """

    device_ids: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    leaves: tuple[PlacedLeaf, ...]

    def group(self, devices: Mapping[int, jax.Device]) -> Group:
        """Returns the group on these devices, by their ids."""
        grid = np.empty(len(self.device_ids), object)
        grid[:] = [devices[number] for number in self.device_ids]
        return Group(mesh=Mesh(grid.reshape(self.shape), self.axes), leaves=self.leaves)
