"""A computation that shows whether the devices of a host are sound.

Each device multiplies matrices of small integers, whose products and sums are exact in
the floating point of all hardware and in any order, so that all devices have to compute
one known number. Hosts of a slice that is new or has crashed do this while they restore
and compile, and before their first step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epy

from elastic_ckpt.core import errors

with epy.lazy_imports():
    import jax

# What sound devices compute; a test computes it with integers.
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
        here = jax.NamedSharding(jax.sharding.Mesh([device], ("device",)), jax.P())
        places = np.indices((_SIZE, _SIZE), np.int32)
        rows, columns = (jax.device_put(each, here) for each in places)
        computed = compiled(jax.jit(_compute), rows, columns)(rows, columns)
        value = int(computed) + error
        if value != EXPECTED:
            raise DeviceWrongError(
                f"{device} computed {value}, and sound devices compute {EXPECTED}"
            )


def _compute(rows: jax.Array, columns: jax.Array) -> jax.Array:
    weights = (5 * rows + 3 * columns * columns + 1) % _MODULUS

    def multiply(_: int, values: jax.Array) -> jax.Array:
        product = values.astype("float32") @ weights.astype("float32")
        return product.astype("int32") % _MODULUS

    begin = (7 * rows + 11 * columns) % _MODULUS
    values = jax.lax.fori_loop(0, _ROUNDS, multiply, begin)
    # It depends on the order of rows and columns, modulo 2**32.
    position = (rows * _SIZE + columns + 1).astype("uint32")
    return (values.astype("uint32") * position).sum(dtype="uint32")
