"""Random keys that do not depend on the number of hosts."""

from __future__ import annotations

import functools
from typing import Any

import jax

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import digest, errors

# The first number folded into a key, so that different kinds of keys never coincide.
_NEXT, _SHARD, _NAME = range(3)
_LOW = 2**32 - 1


class Rng(Component):
    """A component with a global random key, from which all other keys are derived.

    The derived keys depend on a name, a logical shard or a count, never on a host
    index, so a run continues with the same keys on any number of hosts.

        rng = ec.components.Rng(seed=0)
        dropout = rng.for_name("dropout", step)
        noise = rng.for_shard(shard, step)
        key = rng.next()

    Args:
      seed: an integer, or a typed key from `jax.random.key`.
      required: see `Component`.

    Raises:
      ConfigError: if `seed` is neither an integer nor a single typed key.
    """

    def __init__(self, seed: int | jax.Array = 0, *, required: bool = True) -> None:
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        is_key = isinstance(key, jax.Array) and jax.dtypes.issubdtype(
            key.dtype, jax.dtypes.prng_key
        )
        if not is_key or key.shape:
            # An array's repr may have multiple lines.
            shown = " ".join(repr(seed).split())
            raise errors.ConfigError(
                f"Rng takes an integer or one typed key, not {shown}; create a key with"
                " jax.random.key, or convert an old-style key with"
                " jax.random.wrap_key_data"
            )
        super().__init__({"key": key, "taken": 0}, "global", required=required)

    @property
    def key(self) -> jax.Array:
        """The global key, a typed key of shape `()`."""
        return self.state["key"]

    def next(self) -> jax.Array:
        """A key that no earlier call returned; all hosts must make the same calls.

        The number of calls is part of the saved state.
        """
        taken = self.state["taken"]
        self.state = {**self.state, "taken": taken + 1}
        return _folded(self.key, _NEXT, taken & _LOW, taken >> 32)

    def for_shard(self, shard: int, step: Any = 0) -> jax.Array:
        """The key for a logical shard and `step`, a 32-bit integer, possibly traced."""
        return _folded(self.key, _SHARD, shard, step)

    def for_name(self, name: str, step: Any = 0) -> jax.Array:
        """The key for a name and `step`, a 32-bit integer, possibly traced."""
        number = digest.name_hash(name)
        return _folded(self.key, _NAME, number & _LOW, number >> 32, step)


def _folded(key: jax.Array, *numbers: Any) -> jax.Array:
    # A program may have disallowed implicit transfers, such as those of numbers.
    with jax.transfer_guard("allow"):
        return functools.reduce(jax.random.fold_in, numbers, key)
