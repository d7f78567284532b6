"""Trees: the saved leaves, and the arrays that a restore builds from boxes.

A leaf's path consists of its checkpointable's name and its keys in that tree, such as
`state/params/layers/0/kernel`. In a key, `/` is written `~1` and `~` is written `~0`.

A typed random key is saved as its data, which has one more dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import escaped

KeyPath = tuple[Any, ...]

_KNOWN_PATHS: dict[tuple[str, str], tuple[str, ...]] = {}
_MOST_KNOWN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractArray:
    """A NumPy array without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype


def leaf_path(checkpointable: str, key_path: KeyPath) -> str:
    """A leaf's path, such as `state/params/w`."""
    keys = (jax.tree_util.keystr((key,), simple=True) for key in key_path)
    return "/".join([checkpointable, *map(escaped, keys)])


def structure_text(tree: Any) -> str:
    """Text that distinguishes tree structures, for use as a cache key.

    Comparing the structures themselves would compare the data of user-defined nodes,
    which may be arrays, or keys that are equal, such as 1 and True.
    """
    text = str(jax.tree.structure(tree))
    if "CustomNode" in text:
        # JAX truncates the data of custom nodes, which may determine their keys.
        text += repr([path for path, _ in jax.tree.leaves_with_path(tree)])
    return text


def leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of all trees, keyed by path; `None` is not a leaf."""
    return {
        path: leaf
        for name, tree in trees.items()
        for path, leaf in zip(_paths(name, tree), jax.tree.leaves(tree), strict=True)
    }


def _paths(name: str, tree: Any) -> tuple[str, ...]:
    # Cached, because each save has the same tree, and naming its leaves takes longer
    # than copying them.
    key = name, structure_text(tree)
    if key not in _KNOWN_PATHS:
        if len(_KNOWN_PATHS) > _MOST_KNOWN:
            _KNOWN_PATHS.clear()
        _KNOWN_PATHS[key] = tuple(
            leaf_path(name, path) for path, _ in jax.tree.leaves_with_path(tree)
        )
    return _KNOWN_PATHS[key]


def arrays(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that hosts capture: all except strings, which are in manifests."""
    return {
        path: leaf for path, leaf in leaves(trees).items() if not isinstance(leaf, str)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedLeaf:
    """A requested leaf, described in terms of the saved leaf.

    Attributes:
      shape: the saved shape of the whole array.
      dtype: the requested dtype; None means the saved dtype.
      sharding: the sharding of the restored leaf; None keeps the leaf whole, in this
        process.
      finish: a function that builds the leaf from an array of that dtype, which is a
        JAX array if there is a sharding, and otherwise a NumPy array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any = None
    sharding: Sharding | None = None
    finish: Callable[[Any], Any] = lambda array: array


@dataclasses.dataclass(frozen=True, kw_only=True)
class WantedLeaf:
    """The boxes that this host needs of a requested leaf, in saved coordinates.

    Attributes:
      shape: the saved shape of the whole array.
      boxes: the boxes that this host needs, without repetitions.
      place: a function that takes a box's index and values, and moves the values to
        where they are needed.
      join: a function that builds the leaf from the results of `place` for all boxes,
        in order.
      is_moved: whether `place` copies the values; their memory is reused once the
        results are ready.
    """

    path: str
    shape: tuple[int, ...]
    boxes: tuple[boxes.Box, ...]
    place: Callable[[int, np.ndarray], Any]
    join: Callable[[list[Any]], Any]
    is_moved: bool = False

    def make(self, values: Sequence[np.ndarray]) -> Any:
        """Builds the leaf from the values of all boxes, in order."""
        return self.join([self.place(*each) for each in enumerate(values)])


def asked(abstract: Mapping[str, Any]) -> list[AskedLeaf]:
    """Describes the requested leaves of abstract trees.

    A leaf is one of: an array, a `jax.ShapeDtypeStruct` or any other object with shape,
    dtype and sharding, which becomes an array with that sharding (on a device of this
    host if the sharding is None); an object with only shape and dtype, which becomes a
    NumPy array; or a number, which becomes a number of the same type.

    Raises:
      CheckpointError: if a leaf is anything else.
    """
    return [_asked(path, leaf) for path, leaf in leaves(abstract).items()]


def wanted(
    abstract: Mapping[str, Any], *, most_bytes: int = layout.CHUNK_BYTES
) -> list[WantedLeaf]:
    """Returns the boxes that this host needs for each leaf of abstract trees.

    Args:
      abstract: the trees, by name.
      most_bytes: the maximum size of a box; larger boxes are assembled from pieces on
        their device. By default, each chunk's file can be sent unchanged.

    Raises:
      CheckpointError: see `asked`.
    """
    return [_of_this_host(leaf, most_bytes) for leaf in asked(abstract)]


def check_same_model(
    what: str, saved: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Raises an OtherModelError that lists the first leaves that differ, if any do."""
    differing = [
        f"{path}: saved {saved.get(path, 'nothing')}, now {now.get(path, 'nothing')}"
        for path in sorted(saved.keys() | now.keys())
        if saved.get(path) != now.get(path)
    ]
    if differing:
        shown = "; ".join(differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise errors.OtherModelError(
            f"{what} is a checkpoint of a different model: its tree differs from the"
            f" requested tree ({shown}{more}); request the saved shapes and types, load"
            " it through a `layout`, or start a new run in a different directory (with"
            " a different run_name in a configuration)"
        )


def rebuilt(tree: Any, name: str, made: Mapping[str, Any]) -> Any:
    """Replaces each leaf of `tree` with the leaf that `made` has at its path."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [made[path] for path in _paths(name, tree)]
    )


def _asked(path: str, leaf: Any) -> AskedLeaf:
    if isinstance(leaf, bool | int | float | complex | np.generic):
        kind, dtype = type(leaf), np.asarray(leaf).dtype

        def number(array: np.ndarray) -> Any:
            # An int may have the value of any saved integer.
            is_wide = kind is int and array.dtype == np.uint64
            return kind(cast(path, array, array.dtype if is_wide else dtype)[()])

        return AskedLeaf(path=path, shape=(), finish=number)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise errors.CheckpointError(
            f"{path.removeprefix('/')} cannot be restored as {type(leaf).__name__};"
            " pass an array, a jax.ShapeDtypeStruct with a sharding, a NumPy array or a"
            " number, or None to skip it"
        )
    if not hasattr(leaf, "sharding"):
        dtype = np.dtype(leaf.dtype)
        return AskedLeaf(
            path=path,
            shape=tuple(leaf.shape),
            dtype=dtype if dtype.isnative else dtype.newbyteorder("="),
        )
    sharding = _with_devices(path, leaf.sharding)
    asked = AskedLeaf(
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype,
        sharding=sharding,
        finish=weakly_typed if is_weak(leaf) else lambda array: array,
    )
    if not is_key(leaf):
        return asked
    # A key's data has one more dim.
    numbers = jax.eval_shape(jax.random.key_data, leaf)
    if isinstance(sharding, NamedSharding):
        more = [None] * (len(numbers.shape) - len(sharding.spec))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *more))
    return dataclasses.replace(
        asked,
        shape=tuple(numbers.shape),
        dtype=numbers.dtype,
        sharding=sharding,
        finish=functools.partial(jax.random.wrap_key_data, impl=key_impl(leaf)),
    )


def cast(path: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    """Casts saved values to the requested dtype.

    Floating-point values may be rounded, but complex values may not become real. No
    other values may change.

    Raises:
      CheckpointError: if a value would change; the message names the leaf and the
        value.
    """
    if values.dtype == dtype:
        return values
    is_real = np.iscomplexobj(values) and not np.issubdtype(dtype, np.complexfloating)
    with np.errstate(all="ignore"):
        made = (values.real if is_real else values).astype(dtype)
        is_rounded = all(jnp.issubdtype(d, jnp.inexact) for d in (values.dtype, dtype))
        if is_rounded and not is_real:
            is_kept = np.isfinite(made) | ~np.isfinite(values)
        else:
            # Also detects an integer that wraps both ways.
            is_kept = made.astype(values.dtype) == values
            is_kept &= (made < 0) == (values < 0)
    if not is_kept.all():
        raise errors.CheckpointError(
            f"{path.removeprefix('/')} was saved with the value {values[~is_kept][0]}"
            f" ({values.dtype}), which would become {made[~is_kept][0]} as the"
            f" requested {made.dtype}; request the saved dtype and convert the values"
            " yourself"
        )
    return made


def _with_devices(path: str, sharding: Sharding | None) -> Sharding:
    # Under `jax.set_mesh`, `jax.eval_shape` returns shardings on an abstract mesh.
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        mesh = jax.sharding.get_mesh()
        if mesh.abstract_mesh != sharding.mesh:
            raise errors.CheckpointError(
                f"{path.removeprefix('/')} has a sharding on an abstract mesh, which"
                f" has no devices ({sharding.mesh}); restore it inside the"
                " jax.set_mesh(mesh) block in which the sharding was created"
            )
        memory_kind = sharding.memory_kind
        return NamedSharding(mesh, sharding.spec, memory_kind=memory_kind)
    return sharding or SingleDeviceSharding(jax.local_devices()[0])


def _of_this_host(leaf: AskedLeaf, most_bytes: int | None) -> WantedLeaf:
    shape, dtype, sharding = leaf.shape, leaf.dtype, leaf.sharding
    if sharding is None:
        return WantedLeaf(
            path=leaf.path,
            shape=shape,
            boxes=(boxes.whole(shape),),
            place=lambda _, values: cast(leaf.path, values, dtype or values.dtype),
            join=lambda placed: leaf.finish(placed[0]),
        )
    places: dict[boxes.Box, list[Sharding]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        places.setdefault(boxes.of_index(index or (), shape), []).append(place)
    is_far = any(each.platform != "cpu" for each in sharding.addressable_devices)
    (device, *_) = sharding.addressable_devices
    if sharding.memory_kind not in (None, device.default_memory().kind):
        # Pieces can only be assembled in the default memory of devices.
        most_bytes = None
    pieces = [
        (box, piece)
        for box in places
        for piece in _cut(box, np.dtype(dtype).itemsize, most_bytes)
    ]
    # Pieces of different boxes that share saved boxes are then read together.
    pieces.sort(key=lambda each: each[1].start)
    # The box that is being assembled from pieces on each device.
    growing: dict[Sharding, jax.Array] = {}

    def put(number: int, values: np.ndarray) -> list[jax.Array]:
        box, piece = pieces[number]
        values = cast(leaf.path, values, dtype)
        placed = [jax.device_put(values, place) for place in places[box]]
        if piece == box:
            # On a CPU, these arrays share the memory of `values`. Such memory cannot be
            # donated, so the next step would allocate the new state beside it.
            if not is_far:
                placed = jax.device_put(placed, places[box], may_alias=False)
            return placed
        start = [a - b for a, b in zip(piece.start, box.start, strict=True)]
        # A program may have disallowed implicit transfers, such as those of numbers.
        with jax.transfer_guard("allow"):
            for place, part in zip(places[box], placed, strict=True):
                if not any(start):
                    # `jnp.empty(device=...)` would make zeros on the first device, too.
                    empty = jax.jit(
                        jax.lax.empty, static_argnums=(0, 1), out_shardings=place
                    )
                    growing[place] = empty(box.shape, part.dtype)
                growing[place] = _updated(growing[place], part, start)
        # The caller cannot wait for these arrays, because the next piece donates them.
        jax.block_until_ready([growing[place] for place in places[box]])
        if piece.stop != box.stop:
            return []
        return [growing.pop(place) for place in places[box]]

    return WantedLeaf(
        path=leaf.path,
        shape=shape,
        boxes=tuple(piece for _, piece in pieces),
        place=put,
        join=lambda placed: leaf.finish(
            jax.make_array_from_single_device_arrays(
                shape, sharding, [part for of_box in placed for part in of_box]
            )
        ),
        is_moved=True,
    )


def _cut(box: boxes.Box, item_bytes: int, most_bytes: int | None) -> list[boxes.Box]:
    # The pieces of a box, in C order; the last one ends where the box ends.
    if most_bytes is None or box.volume * item_bytes <= most_bytes:
        return [box]
    chunk = layout.chunk_shape(box.shape, item_bytes=item_bytes, chunk_bytes=most_bytes)
    return [
        boxes.Box(
            start=tuple(a + n for a, n in zip(box.start, piece.start, strict=True)),
            stop=tuple(a + n for a, n in zip(box.start, piece.stop, strict=True)),
        )
        for piece in layout.cut(boxes.whole(box.shape), chunk)
    ]


@functools.partial(jax.jit, donate_argnums=0)
def _updated(whole: jax.Array, part: jax.Array, start: Sequence[int]) -> jax.Array:
    made = jax.lax.dynamic_update_slice(as_bits(whole), as_bits(part), start)
    return of_bits(made, whole.dtype)


def as_bits(array: jax.Array) -> jax.Array:
    """Casts small floats to integers with the same bits.

    Compilers would compute with wider floats, which changes the bits of NaNs.
    """
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    kinds = {8: jnp.uint8, 16: jnp.uint16}
    kind = kinds.get(jnp.finfo(array.dtype).bits) if is_float else None
    return array if kind is None else jax.lax.bitcast_convert_type(array, kind)


def of_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Reverses `as_bits` for an array of `dtype`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys, or its abstract form."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_weak(leaf: Any) -> bool:
    """Whether a leaf is a weakly typed array, or its abstract form."""
    return bool(getattr(leaf, "weak_type", False))


def weakly_typed(array: Any) -> jax.Array:
    """The same array with a weak type.

    JAX's functions would compute it, and its debugging flags then reject a NaN.
    """
    shards = [shard.data for shard in array.addressable_shards]
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, shards, committed=True)


def key_impl(key: Any) -> Any:
    """The implementation of typed random keys, which may be abstract."""
    # JAX needs an array of keys, such as a tracer.
    impls: list[Any] = []
    jax.eval_shape(lambda traced: impls.append(jax.random.key_impl(traced)), key)
    return impls[0]
