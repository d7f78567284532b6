"""Loads a step with Orbax alone, and prints what it found as JSON.

    python -I stock_program.py <root> <renamed|in place> <rows> <columns>

Imports nothing of ours: it also runs where nothing of ours is installed. Tests save
`state`.
"""

import hashlib
import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp


def state(mesh):
    """A state with leaves of all kinds; arrays lie over a mesh of two axes."""

    def over(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    first, second = mesh.axis_names
    generator = np.random.default_rng(7)
    return {
        "params": {
            "w": over(generator.random((8, 16), np.float32), first, second),
            "b": over(jnp.arange(16, dtype=jnp.bfloat16), second),
            "zeros": over(jnp.zeros((8, 8)), first),
        },
        "opt": (over(jnp.int32(3)), [None, np.arange(5.0)], {}),
        "key": over(jax.random.key(3)),
        "step": 12,
        "rate": 0.1,
    }


def data(leaf):
    """The values of a leaf as they are stored."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def digests(tree):
    """The type, the shape and the digest of the values of each leaf."""
    by_path = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        kind = str(getattr(leaf, "dtype", type(leaf).__name__))
        values = data(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        content = hashlib.sha256(values.tobytes()).hexdigest()
        by_path[name] = [kind, list(values.shape), content]
    return by_path


def abstract(metadata, mesh):
    """The tree to load: the same arrays over another mesh."""

    def one(leaf):
        if not hasattr(leaf, "sharding_metadata"):
            return leaf
        # Each dim of 8 or more over an axis.
        axes = list(mesh.axis_names)
        spec = [axes.pop(0) if axes and size % 8 == 0 else None for size in leaf.shape]
        over = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over)

    return jax.tree.map(one, metadata)


def context(kind):
    """The context in which Orbax takes steps of that kind as committed."""
    chosen = ocp.Context()
    names = {"in place": "COMMIT_FILE", "renamed": "ATOMIC_RENAME"}
    chosen.atomicity.mode = ocp.options.AtomicityMode[names[kind]]
    return chosen


def load(root, kind, shape):
    """All ways of loading, each as digests."""
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(auto, auto))
    with context(kind), ocp.training.Checkpointer(root) as checkpointer:
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
    root, kind, *shape = sys.argv[1:]
    rows, columns = map(int, shape)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", rows * columns)
    is_there = importlib.util.find_spec("elastic_ckpt") is not None
    print(json.dumps({**load(root, kind, (rows, columns)), "ours": is_there}))


if __name__ == "__main__":
    main()
