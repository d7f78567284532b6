"""Digests of what each device holds of arrays, computed on the devices themselves.

A program runs on all devices of a mesh (`jax.shard_map` over every axis), so that each
replica is read where it lies; a jitted function of a replicated array might look at one
of them. One program digests all arrays of a mesh. It is compiled once for their shapes.

A digest is a sum modulo 2**32 over the words of a part. Each word is added to a number
that depends on its position, and the sum goes through a one-to-one function of 32 bits
(a multiplication by an odd number between two xor-shifts, as in the finaliser of
MurmurHash3). So a change of one word, of one bit for example, always changes the
digest; changes of several words, as of a swap, are missed with a probability of about
2**-32. Only integers are added, so the order of a sum does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import topology

# What to compute of each part: a digest of about a thousand elements; a digest of all;
# or that, and the number of elements that differ between replicas.
Kind = Literal["quick", "tensor", "full"]

_SAMPLE = 1024
# Odd numbers: the second is a multiplier of MurmurHash3's finaliser (Appleby 2008).
_STRIDE = 0x9E3779B1
_MULTIPLIER = 0x85EBCA6B


class Looked(NamedTuple):
    """The digest of the part of an array that a device holds.

    Attributes:
      digest: of its bits, or of those of a sample, in hex.
      differing: the number of elements that differ between the replicas; None if they
        were not compared.
    """

    digest: str
    differing: int | None = None


def look(arrays: Sequence[jax.Array], kind: Kind) -> list[Mapping[jax.Device, Looked]]:
    """Looks at the part of each array that each device of this process holds.

    All processes that share arrays call this alike.

    Args:
      arrays: of any dtypes and shardings.
      kind: of what to compute. Replicas are compared over the network between the
        devices.

    Returns:
      For each array, by device.
    """
    looked: list[Mapping[jax.Device, Looked]] = [{}] * len(arrays)
    groups: dict[tuple[Mesh, int | None], list[tuple[int, Any]]] = {}
    for number, array in enumerate(arrays):
        on_mesh, is_replica = _on_mesh(array)
        compared = kind == "full" and is_replica
        compared = compared and bool(topology.replica_axes(on_mesh.sharding))
        # Comparisons need memory of the size of an array: one at a time.
        group = groups.setdefault(
            (on_mesh.sharding.mesh, number if compared else None), []
        )
        group.append((number, on_mesh))
    for (mesh, compared), members in groups.items():
        specs = tuple(array.sharding.spec for _, array in members)
        of_group = "tensor" if kind == "full" and compared is None else kind
        program = _compiled(mesh, specs, of_group)
        shards = program([array for _, array in members]).addressable_shards
        for shard in shards:
            shard.data.copy_to_host_async()
        rows = {shard.device: np.asarray(shard.data)[0] for shard in shards}
        for column, (number, _) in enumerate(members):
            looked[number] = {
                device: Looked(f"{words[0]:08x}", *map(int, words[1:]))
                for device, words in ((each, rows[each][column]) for each in rows)
            }
    return looked


def host_sample(values: np.ndarray) -> np.ndarray:
    """The elements of `values` that a sample of them consists of."""
    return np.ascontiguousarray(values[_sample(values.shape)])


def _on_mesh(array: jax.Array) -> tuple[Any, bool]:
    # The array under a NamedSharding, and whether its replicas are those of the mesh.
    if isinstance(array.sharding, NamedSharding) and array.sharding.mesh.axis_names:
        return array, True
    # Each local device gets an axis, and its part stands for a replica of a whole.
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    mesh = Mesh(np.array([shard.device for shard in shards]), ("device",))
    parts = [shard.data for shard in shards]
    together = jax.make_array_from_single_device_arrays(
        parts[0].shape, topology.replicated(mesh), parts
    )
    return together, False


@functools.lru_cache(maxsize=2**12)
def _compiled(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], kind: Kind
) -> Callable[[list[jax.Array]], jax.Array]:
    # Returns uint32 `[devices, arrays, words]`.
    def words(part: jax.Array, spec: PartitionSpec) -> jax.Array:
        if jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
            part = jax.random.key_data(part)
        if kind == "quick":
            part = part[_sample(part.shape)]
        digest = part_digest(part)
        if kind != "full":
            return digest[None]
        axes = topology.replica_axes(NamedSharding(mesh, spec))
        differing = _differing(part, axes)
        return jnp.stack([digest, differing])

    def of_device(parts: list[jax.Array]) -> jax.Array:
        return jnp.stack([*map(words, parts, specs)])[None]

    return jax.jit(
        jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(list(specs),),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
    )


def part_digest(part: jax.Array) -> jax.Array:
    """The digest of an array that one device holds, a uint32; to be traced."""
    digest = jnp.uint32(0)
    for number, words in enumerate(_bits(part)):
        words = words.astype(jnp.uint32) + _positions(words.shape, number)
        words = words ^ (words >> 16)
        words = words * np.uint32(_MULTIPLIER)
        words = words ^ (words >> 15)
        digest += words.sum(dtype=jnp.uint32)
    return digest


def _positions(shape: tuple[int, ...], number: int) -> jax.Array | np.uint32:
    # The number of each element times an odd number, modulo 2**32.
    positions: Any = np.uint32(number << 16)
    stride = _STRIDE
    for dim in reversed(range(len(shape))):
        steps = lax.broadcasted_iota(jnp.uint32, shape, dim)
        positions = positions + steps * np.uint32(stride % 2**32)
        stride *= shape[dim]
    return positions


def _bits(part: jax.Array) -> list[jax.Array]:
    # The bits of an array as unsigned integers of at most 32 bits.
    dtype = part.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [*_bits(lax.real(part)), *_bits(lax.imag(part))]
    if dtype == jnp.bool_:
        return [part.astype(jnp.uint8)]
    is_float = jnp.issubdtype(dtype, jnp.floating)
    num_bits = (jnp.finfo if is_float else jnp.iinfo)(dtype).bits
    # 64 bits become one more dim.
    unsigned = jnp.dtype(f"uint{min(num_bits, 32)}")
    words = lax.bitcast_convert_type(part, unsigned)
    # No network has smaller ones.
    return [words.astype(jnp.uint8) if num_bits < 8 else words]


def _differing(part: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    # How many elements differ between the devices along the axes.
    differ = jnp.zeros(part.shape, bool)
    for words in _bits(part):
        words = words.astype(jnp.uint32)
        unequal = lax.pmin(words, axes) != lax.pmax(words, axes)
        # 64 bits are two words of an element.
        differ |= unequal.reshape((*part.shape, -1)).any(axis=-1)
    return differ.sum(dtype=jnp.uint32)


def _sample(shape: tuple[int, ...]) -> tuple[slice, ...]:
    # About as many elements of each dim, spread over it.
    most = max(1, int(_SAMPLE ** (1 / max(1, len(shape)))))
    return tuple(slice(None, None, -(-size // most) or 1) for size in shape)
