"""The sharing pattern of arrays of JAX, read from their sharding.

Arrays need no declared pattern. One whose parts are on several hosts belongs with the
weights, in a pytree beside the components: that is saved part by part, and restored on
any other mesh.
"""

from __future__ import annotations

from typing import Any

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
    if not isinstance(layout, NamedSharding):
        if len(layout.device_set) == 1:
            return sharing.GLOBAL
        return sharing.REPLICATED if layout.is_fully_replicated else SHARDED
    shared = topology.replica_axes(layout)
    if len(shared) == sum(size > 1 for size in layout.mesh.shape.values()):
        return sharing.REPLICATED if shared else sharing.GLOBAL
    return f"{sharing.PER_GROUP}({', '.join(shared)})" if shared else SHARDED
