"""A computation that shows whether the devices of a host are sound.

Each device multiplies matrices of small integers, whose products and sums are exact in
the floating point of all hardware and in any order, so that all devices have to compute
one known number. Hosts of a slice that is new or has crashed do this while they restore
and compile, and before their first step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import errors

if TYPE_CHECKING:
    import jax

# The result of `compute` on sound devices; a test computes it with integers.
EXPECTED = 2136504280
_SIZE = 256
_ROUNDS = 16
# A prime. Values below it have 8 bits, so that bfloat16 holds them, and the sum of
# _SIZE products is below 2**24, so that float32 holds it.
_MODULUS = 251


class DeviceWrongError(errors.RunError):
    """A device computes wrong values."""


def check_devices(
    devices: Sequence[jax.Device],
    compiled: Callable[..., Any] = lambda jitted, *_: jitted,
    *,
    error: int = 0,
) -> None:
    """Checks that devices of this process compute what sound ones do.

    Args:
      devices: of this process.
      compiled: compiles a jitted function for its arguments.
      error: added to what they compute: a fault.

    Raises:
      DeviceWrongError: if one does not.
    """
    for device in devices:
        value = compute(device, compiled) + error
        if value != EXPECTED:
            raise DeviceWrongError(
                f"{device} computed {value}, and sound devices compute {EXPECTED}"
            )


def compute(device: jax.Device, compiled: Callable[..., Any]) -> int:
    """The number that a device computes; `EXPECTED` on a sound one."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def rounds(rows: jax.Array, columns: jax.Array) -> jax.Array:
        weights = (5 * rows + 3 * columns * columns + 1) % _MODULUS

        def multiply(_: int, values: jax.Array) -> jax.Array:
            product = values.astype(jnp.float32) @ weights.astype(jnp.float32)
            return product.astype(jnp.int32) % _MODULUS

        values = jax.lax.fori_loop(
            0, _ROUNDS, multiply, (7 * rows + 11 * columns) % _MODULUS
        )
        # It depends on the order of rows and columns, modulo 2**32.
        position = (rows * _SIZE + columns + 1).astype(jnp.uint32)
        return (values.astype(jnp.uint32) * position).sum(dtype=jnp.uint32)

    mesh = jax.sharding.Mesh([device], ("device",))
    here = jax.NamedSharding(mesh, jax.P())
    arrays = [
        jax.device_put(each, here) for each in np.indices((_SIZE, _SIZE), np.int32)
    ]
    return int(compiled(rounds, *arrays)(*arrays))
