"""Capture: a copy in host memory of what this process holds of a state.

The trainer is blocked only for this copy: digests, files and copies for peers are made
from it, beside the training. Replicas on devices of one process are copied once; other
processes copy theirs, because replicas count as holders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from elastic_ckpt.checkpoint.host import views
from elastic_ckpt.core import boxes, errors, host_memory
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf

Whole = np.ndarray | np.generic | int | float | bool

# The dtypes of JAX that TensorStore's zarr v3 arrays store bit by bit.
STORABLE = frozenset(
    {
        "bfloat16",
        "bool",
        "complex128",
        "complex64",
        "float16",
        "float32",
        "float4_e2m1fn",
        "float64",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int16",
        "int2",
        "int32",
        "int4",
        "int64",
        "int8",
        "uint16",
        "uint32",
        "uint64",
        "uint8",
    }
)
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shards(CapturedLeaf):
    """The shards that a host holds of an array that other code has assembled.

    Attributes:
      kept: whether no other code changes the values, so that they need no copy.
      is_own: whether this host uploads a box if no RAM disk has the step; by default
        it uploads all of them.
      group_of: the name of the hosts that hold a box; empty for this one alone, as all
        are by default.
    """

    kept: bool
    is_own: Callable[[boxes.Box], bool] | None = None
    group_of: Callable[[boxes.Box], str] | None = None


Value = jax.Array | Whole | Shards


def capture(
    leaves: Mapping[str, Value],
    pool: host_memory.Pool,
    held: views.Views | None = None,
) -> Captured:
    """Copies what this process holds of a state; arrays may be donated afterwards.

    All copies lie in one piece of memory, so that the next capture of such a state
    touches pages that are warm. Values that are fetched from a device are a copy
    already, and are not copied again; for arrays in the host's memory, views may be
    enough.

    Args:
      leaves: by path: arrays of JAX under any sharding, typed random keys (their data
        is captured), values that are whole in every process (arrays of NumPy and
        numbers), and `Shards`.
      pool: lends the memory, and gets it back.
      held: decides for which leaves views are held until the release; None copies all.

    Raises:
      CheckpointError: if a leaf is of another type, or of a dtype that no tier stores;
        it names the leaf.
    """
    with _no_collection():
        parts = []
        num_bytes = 0
        here = [_held(path, leaves[path], held) for path in sorted(leaves)]
        for leaf, shard_shape, shards, kept in here:
            copies = []
            for box, shard in shards:
                values = np.asarray(shard)
                # Fetched values own their memory, which no other code uses.
                own = kept or (values is not shard and values.flags.owndata)
                copies.append((box, values, None if own else num_bytes))
                num_bytes += 0 if own else _aligned(values.nbytes)
            parts.append((leaf, shard_shape, copies))
        memory = pool.take(num_bytes)
        captured = [
            CapturedLeaf(
                leaf=leaf,
                shard_shape=shard_shape,
                boxes=tuple(
                    [(box, _copied(values, memory, at)) for box, values, at in copies]
                ),
            )
            for leaf, shard_shape, copies in parts
        ]

    return Captured(captured, on_release=functools.partial(pool.give_back, memory))


def numbers(value: Any) -> Any:
    """Returns `value`, or the numbers of a typed random key."""
    if isinstance(value, jax.Array) and _is_key(value.dtype):
        return jax.random.key_data(value)
    return value


def leaf_of(path: str, value: jax.Array | Whole) -> Leaf:
    """Returns the leaf of `value`, independent of its elements.

    Raises:
      CheckpointError: as `capture`.
    """
    if isinstance(value, jax.Array):
        return Leaf(path=path, shape=value.shape, dtype=_dtype(path, value.dtype))
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise errors.CheckpointError(
            f"leaf {path!r} is a {type(value).__name__}, and a state has arrays and"
            " numbers; take it out of the state, or save it as a separate"
            " checkpointable"
        )
    array = np.asarray(value)
    return Leaf(path=path, shape=array.shape, dtype=_dtype(path, array.dtype))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _copied(values: np.ndarray, memory: np.ndarray, offset: int | None) -> np.ndarray:
    # Copies values into the memory at their offset, if they have one.
    if offset is None:
        return values
    copy = np.ndarray(values.shape, values.dtype, memory, offset)
    np.copyto(copy, values)
    return copy


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # Thousands of new objects would start garbage collections over all objects of a
    # training process, which cost more than the copies.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Shards = Sequence[tuple[boxes.Box, jax.Array | np.ndarray]]


def _held(
    path: str, value: Value, held: views.Views | None
) -> tuple[Leaf, tuple[int, ...], _Shards, bool]:
    # The leaf, the shape of its shards, the local ones without replicas, and whether
    # they need no copy.
    if isinstance(value, Shards):
        return value.leaf, value.shard_shape, value.boxes, value.kept
    value = numbers(value)
    leaf = leaf_of(path, value)
    if not isinstance(value, jax.Array):
        # In this machine's byte order, which is that of the files.
        array = np.asarray(value, np.dtype(leaf.dtype))
        whole = [(boxes.whole(array.shape), array)] if array.size else []
        return leaf, array.shape, whole, False
    placement = _placement(value.sharding, value.shape)
    shards = value.addressable_shards
    if not placement.far:
        # Views; keeping JAX's objects instead would cost rounds of garbage collection.
        in_place = [(box, np.asarray(shards[n].data)) for n, box in placement.boxes]
        kept = held is not None and held.allow(path, value)
        return leaf, placement.shard_shape, in_place, kept
    for number, _ in placement.boxes:
        # Devices send while the first arrays are being copied.
        shards[number].data.copy_to_host_async()
    far = [(box, shards[number].data) for number, box in placement.boxes]
    return leaf, placement.shard_shape, far, False


class _Placement(NamedTuple):
    # The first shard with each local box; `far`: whether they have to be fetched.
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[int, boxes.Box], ...]
    far: bool


@functools.lru_cache(maxsize=2**14)
def _placement(sharding: Sharding, shape: tuple[int, ...]) -> _Placement:
    indices = sharding.addressable_devices_indices_map(shape)
    first: dict[boxes.Box, int] = {}
    for number, index in enumerate(indices.values()):
        assert index is not None
        first.setdefault(boxes.of_index(index, shape), number)
    return _Placement(
        shard_shape=sharding.shard_shape(shape),
        boxes=tuple((number, box) for box, number in first.items() if box.volume),
        far=any(device.platform != "cpu" for device in indices),
    )


@functools.lru_cache
def _is_key(dtype: np.dtype) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


# A dtype's name takes NumPy as long as a copy of 64 KiB.
@functools.lru_cache(maxsize=2**16)
def _dtype(path: str, dtype: np.dtype) -> str:
    if dtype.name not in STORABLE:
        raise errors.CheckpointError(
            f"leaf {path!r} has the dtype {dtype.name}, which no tier can store; cast"
            " it to a wider one before it is saved"
        )
    return dtype.name
