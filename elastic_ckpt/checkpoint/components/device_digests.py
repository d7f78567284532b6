"""Digests of each device's parts of arrays, computed on the devices themselves.

The parts on this process's devices are treated as replicas of one array on a mesh of
these devices, so that `jax.shard_map` reads each part in place. A single computation
digests all arrays. It is compiled once for their shapes and does not involve other
processes.

A digest is a sum modulo 2**32 over the words of a part. A number that depends on the
word's position is added to each word, and the result goes through a 32-bit bijection (a
multiplication by an odd number between two xor-shifts, as in MurmurHash3's finalizer).
So a change in a single word, even of one bit, always changes the digest; changes in
more than one word, such as a swap, are missed with a probability of about 2**-32. Only
integers are added, so the order of summation does not matter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from elastic_ckpt.core import topology

_SAMPLE = 1024
# Odd numbers; the second is a multiplier in MurmurHash3's finalizer (Appleby 2008).
_STRIDE = 0x9E3779B1
_MULTIPLIER = 0x85EBCA6B


def is_readable(leaf: Any) -> bool:
    """Whether a leaf is an array in device memory, not in host memory."""
    if not isinstance(leaf, jax.Array):
        return False
    device = next(iter(leaf.sharding.addressable_devices))
    return leaf.sharding.memory_kind in (None, device.default_memory().kind)


def look(
    arrays: Mapping[int, jax.Array], *, is_sample: bool
) -> dict[int, Mapping[int, str]]:
    """Digests the parts of arrays on this process's devices.

    Args:
      arrays: arrays of any dtypes and shardings, keyed by an index.
      is_sample: whether to digest only about a thousand elements of each part.

    Returns:
      The digests, in hex, keyed by array index and then by device ID.
    """
    groups: dict[tuple[jax.Device, ...], dict[int, list[Any]]] = {}
    for number, array in arrays.items():
        shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        group = groups.setdefault(tuple(shard.device for shard in shards), {})
        group[number] = [shard.data for shard in shards]
    looked: dict[int, Mapping[int, str]] = {}
    for devices, members in groups.items():
        mesh = Mesh(np.array(devices), ("device",))
        replicas = [
            jax.make_array_from_single_device_arrays(
                parts[0].shape, topology.replicated(mesh), parts
            )
            for parts in members.values()
        ]
        rows = jax.device_get(_compiled(mesh, is_sample=is_sample)(replicas))
        for number, words in zip(members, rows.T, strict=True):
            named = zip(devices, words, strict=True)
            looked[number] = {device.id: f"{word:08x}" for device, word in named}
    return looked


def host_sample(values: np.ndarray) -> np.ndarray:
    """Returns evenly spaced elements of `values`, about a thousand."""
    return np.ascontiguousarray(values[_sample(values.shape)])


def differing(leaf: Any) -> Mapping[int, int]:
    """Counts the elements in each device's part that differ between replicas.

    All processes that share the array must call this.

    Returns:
      The count for each mesh device, keyed by device ID; empty unless the leaf is on a
      mesh that all hosts share.
    """
    is_on_mesh = is_readable(leaf) and hasattr(leaf.sharding, "mesh")
    if not is_on_mesh or (leaf.is_fully_addressable and topology.num_hosts() > 1):
        return {}
    sharding, mesh = leaf.sharding, leaf.sharding.mesh
    axes = topology.replica_axes(sharding)

    def count(part: jax.Array) -> jax.Array:
        differ = jnp.zeros(part.shape, bool)
        for words in _bits(part):
            unequal = lax.pmin(words, axes) != lax.pmax(words, axes)
            # A 64-bit element consists of two words.
            differ |= unequal.reshape((*part.shape, -1)).any(axis=-1)
        return lax.all_gather(differ.sum(dtype=jnp.uint32), mesh.axis_names)

    counts = _on_mesh(count, mesh, sharding.spec, PartitionSpec())(leaf)
    ids = [device.id for device in mesh.devices.flat]
    return dict(zip(ids, jax.device_get(counts).ravel().tolist(), strict=True))


def _on_mesh(
    of_device: Callable[[Any], Any], mesh: Mesh, of: Any, into: PartitionSpec
) -> Callable[[Any], jax.Array]:
    return jax.jit(
        jax.shard_map(
            of_device, mesh=mesh, in_specs=(of,), out_specs=into, check_vma=False
        )
    )


@functools.lru_cache(maxsize=2**6)
def _compiled(mesh: Mesh, *, is_sample: bool) -> Callable[[Any], jax.Array]:
    # Returns a function with a uint32 result, `[devices, arrays]`.
    def of_device(parts: list[jax.Array]) -> jax.Array:
        if is_sample:
            parts = [part[_sample(part.shape)] for part in parts]
        return jnp.stack([*map(part_digest, parts)])[None]

    return _on_mesh(of_device, mesh, PartitionSpec(), PartitionSpec(mesh.axis_names))


def part_digest(part: jax.Array) -> jax.Array:
    """The uint32 digest of an array on one device; called under tracing."""
    digest = jnp.uint32(0)
    for number, words in enumerate(_bits(part)):
        words = words + _positions(words.shape, number)
        words = (words ^ (words >> 16)) * np.uint32(_MULTIPLIER)
        digest += (words ^ (words >> 15)).sum(dtype=jnp.uint32)
    return digest


def _positions(shape: tuple[int, ...], number: int) -> jax.Array | np.uint32:
    # Each element's index times an odd number, modulo 2**32.
    positions: Any = np.uint32(number << 16)
    for dim in range(len(shape)):
        stride = _STRIDE * math.prod(shape[dim + 1 :]) % 2**32
        steps = lax.broadcasted_iota(jnp.uint32, shape, dim)
        positions = positions + steps * np.uint32(stride)
    return positions


def _bits(part: jax.Array) -> list[jax.Array]:
    # An array's bits as uint32; a 64-bit element becomes two words in an extra dim.
    if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        part = jax.random.key_data(part)
    if jnp.issubdtype(part.dtype, jnp.complexfloating):
        return [*_bits(lax.real(part)), *_bits(lax.imag(part))]
    if part.dtype == jnp.bool_:
        return [part.astype(jnp.uint32)]
    is_float = jnp.issubdtype(part.dtype, jnp.floating)
    num_bits = (jnp.finfo if is_float else jnp.iinfo)(part.dtype).bits
    words = lax.bitcast_convert_type(part, jnp.dtype(f"uint{min(num_bits, 32)}"))
    return [words.astype(jnp.uint32)]


def _sample(shape: tuple[int, ...]) -> tuple[slice, ...]:
    # Takes about the same number of elements in each dim, evenly spaced.
    most = max(1, int(_SAMPLE ** (1 / max(1, len(shape)))))
    return tuple(slice(None, None, -(-size // most) or 1) for size in shape)
