"""The sharing pattern of arrays of JAX, read from their sharding.

Arrays need no declared pattern. One whose parts are on several hosts belongs with the
weights, in a pytree beside the components: that is saved part by part, and restored on
any other mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from elastic_ckpt.checkpoint.components import sharing
from elastic_ckpt.core import topology

# Each device has a different part.
SHARDED = "sharded"
# Values of this process alone, whose pattern nothing shows.
UNDECLARED = "undeclared"


def pattern_of(array: Any) -> str:
    """Names how hosts share an array, by its sharding.

    Args:
      array: an array of JAX, or an abstract one.

    Returns:
      `"global"` on one device of the only host, `"per_host"` on devices of this host
      alone, `"replicated"`, `"per_group(data)"` if devices along `data` have the same
      part, `"sharded"` if all have different ones, `"undeclared"` for what has no
      sharding.
    """
    layout = getattr(array, "sharding", None)
    if layout is None:
        return UNDECLARED
    if topology.num_hosts() > 1 and layout.is_fully_addressable:
        return sharing.PER_HOST
    if isinstance(layout, NamedSharding):
        return pattern_of_spec(layout.spec, layout.mesh.shape)
    if len(layout.device_set) == 1:
        return sharing.GLOBAL
    return sharing.REPLICATED if layout.is_fully_replicated else SHARDED


def patterns_of(tree: Any) -> dict[str, str]:
    """The pattern of each leaf of a tree, by its path such as `params/w`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): pattern_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def pattern_of_spec(spec: Iterable[Any], axes: Mapping[str, int]) -> str:
    """As `pattern_of`, of a partition spec over a mesh, as checkpoints describe them.

    Args:
      spec: for each dim of the array, the axes that shard it.
      axes: the sizes of the axes of the mesh.
    """
    used = {axis for entry in spec for axis in topology.axes_of(_tuple(entry))}
    used = {axis for axis in used if axes[axis] > 1}
    shared = [axis for axis, size in axes.items() if size > 1 and axis not in used]
    if not used:
        return sharing.REPLICATED if shared else sharing.GLOBAL
    return f"{sharing.PER_GROUP}({', '.join(shared)})" if shared else SHARDED


def _tuple(entry: Any) -> Any:
    # JSON has lists.
    return tuple(entry) if isinstance(entry, list) else entry
