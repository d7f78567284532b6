"""Loads a step with Orbax alone, and prints what it found as JSON.

    python -I stock_program.py <root> <renamed|in place> <devices> <rows> <columns>

Imports nothing of ours: it also runs where nothing of ours is installed.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp


def digests(tree):
    """The type, the shape and the digest of the values of each leaf."""
    by_path = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        kind = str(getattr(leaf, "dtype", type(leaf).__name__))
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        values = np.asarray(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        content = hashlib.sha256(values.tobytes()).hexdigest()
        by_path[name] = [kind, list(values.shape), content]
    return by_path


def spec(shape, mesh):
    """Shards each dim of 8 or more over an axis of the mesh."""
    axes = list(mesh.axis_names)
    chosen = [axes.pop(0) if axes and size % 8 == 0 else None for size in shape]
    return PartitionSpec(*chosen)


def abstract(metadata, mesh):
    """The tree to load: the same arrays over another mesh."""

    def one(leaf):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or hasattr(
            leaf, "sharding_metadata"
        ):
            sharding = NamedSharding(mesh, spec(leaf.shape, mesh))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return leaf

    return jax.tree.map(one, metadata)


def load(root, kind, shape):
    """All ways of loading, each as digests."""
    mode = ocp.options.AtomicityMode
    chosen = mode.COMMIT_FILE if kind == "in place" else mode.ATOMIC_RENAME
    context = ocp.Context()
    context.atomicity.mode = chosen
    mesh = jax.make_mesh(
        shape, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with context, ocp.training.Checkpointer(root) as checkpointer:
        latest = checkpointer.latest
        metadata = checkpointer.checkpointables_metadata(latest.step).metadata
        wanted = abstract(metadata["state"], mesh)
        there = checkpointer.load_checkpointables(latest.step, {"state": wanted})
        # Without a wish, Orbax takes the devices that the arrays were on.
        plain = digests(ocp.load(latest.path)) if jax.device_count() == 8 else None
        return {
            "step": latest.step,
            "parts": sorted(metadata),
            "is_orbax": ocp.is_orbax_checkpoint(latest.path),
            "metrics": checkpointer.metadata(latest.step).metrics,
            "resharded": digests(there["state"]),
            "devices": len(there["state"]["params"]["w"].sharding.device_set),
            "as_saved": plain,
        }


def main():
    """Runs the program."""
    root, kind, *numbers = sys.argv[1:]
    devices, rows, columns = map(int, numbers)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    try:
        import elastic_ckpt
    except ImportError:
        installed = False
    else:
        installed = bool(elastic_ckpt)
    print(json.dumps({**load(root, kind, (rows, columns)), "ours": installed}))


if __name__ == "__main__":
    main()
