"""A state with leaves of all kinds, and the values of a leaf."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


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
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)
