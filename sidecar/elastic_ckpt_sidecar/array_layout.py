"""Array layouts: which leaves of a state lie where, as head and hosts tell each other.

Leaves over one mesh make a group: its arrays can be handed over in one call, since all
arrays of a call have to lie on the same devices. The mesh is that of the CPU devices
beside the accelerators, in the same order. What the head itself holds, numbers and
arrays of NumPy, is a group too: of bytes, on a device of host 0.

A layout is told once: calls name it by a number, however many leaves it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedLeaf:
    """A leaf of a group.

    Attributes:
      path: of the leaf.
      shape: of the whole array.
      dtype: its name; None stands for that in which it was saved.
      spec: over the axes of the group's mesh; None for what the head holds.
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
        """Of the array of a leaf on the CPU devices."""
        return NamedSharding(self.mesh, PartitionSpec(*(leaf.spec or ())))

    def abstract(
        self, leaf: PlacedLeaf, dtypes: Mapping[str, str]
    ) -> jax.ShapeDtypeStruct:
        """The array of a leaf; of what the head holds, that of its bytes.

        Args:
          leaf: of this group.
          dtypes: by path, those in which leaves were saved.
        """
        dtype = np.dtype(leaf.dtype or dtypes[leaf.path])
        shape = leaf.shape
        if leaf.spec is None:
            shape, dtype = (math.prod(shape) * dtype.itemsize,), np.dtype(np.uint8)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(leaf))

    def to_json(self) -> dict[str, storage.Json]:
        """For a letter."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return {
            "devices": ids.tolist(),
            "axes": list(self.mesh.axis_names),
            "leaves": [
                [leaf.path, list(leaf.shape), leaf.dtype, _spec_json(leaf.spec)]
                for leaf in self.leaves
            ],
        }

    @classmethod
    def from_json(cls, told: Any, devices: Mapping[int, jax.Device]) -> Group:
        """What `to_json` told, on these devices, by their ids."""
        grid = np.vectorize(lambda number: devices[number], otypes=[object])(
            np.array(told["devices"])
        )
        return cls(
            mesh=Mesh(grid, told["axes"]),
            leaves=tuple(
                PlacedLeaf(path=path, shape=tuple(shape), dtype=dtype, spec=_spec(spec))
                for path, shape, dtype, spec in told["leaves"]
            ),
        )


def _spec_json(spec: tuple[Any, ...] | None) -> storage.Json:
    if spec is None:
        return None
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def _spec(told: Any) -> tuple[Any, ...] | None:
    if told is None:
        return None
    return tuple(tuple(axes) if isinstance(axes, list) else axes for axes in told)
