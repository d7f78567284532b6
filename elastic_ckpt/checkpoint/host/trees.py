"""Trees: the leaves of what is saved, and arrays made of boxes when it is restored.

The path of a leaf is the name of its checkpointable and its keys in that tree:
`state/params/layers/0/kernel`. In a key, `/` is written `~1` and `~` is written `~0`.

A typed PRNG key is saved as the numbers that it consists of, under one more dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps.manifest import Contents, escaped

KeyPath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractArray:
    """An array of NumPy without its values.

    Attributes:
      shape: of the array.
      dtype: of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


def leaf_path(checkpointable: str, key_path: KeyPath) -> str:
    """The path of a leaf, such as `state/params/w`."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in key_path]
    return "/".join([checkpointable, *map(escaped, keys)])


def leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of some trees by their paths; `None` is no leaf."""
    return {
        leaf_path(name, path): leaf
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def arrays(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that hosts capture: all but texts, which are in manifests."""
    return {
        path: leaf for path, leaf in leaves(trees).items() if not isinstance(leaf, str)
    }


def _itself(array: Any) -> Any:
    return array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedLeaf:
    """A leaf that a caller requests, in terms of the saved one.

    Attributes:
      path: of the leaf.
      shape: of the whole array, as saved.
      dtype: that is wanted; None takes that in which it was saved.
      sharding: where it goes; None keeps it whole, in this process.
      finish: makes the leaf of an array in that dtype, of JAX if it has a sharding,
        else of NumPy.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any = None
    sharding: Sharding | None = None
    finish: Callable[[Any], Any] = _itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class WantedLeaf:
    """The boxes of a requested leaf that this host needs, in terms of the saved one.

    Attributes:
      path: of the leaf.
      shape: of the whole array, as saved.
      boxes: that this host needs, each once.
      make: makes the leaf of the values of the boxes, in their order.
    """

    path: str
    shape: tuple[int, ...]
    boxes: tuple[boxes.Box, ...]
    make: Callable[[list[np.ndarray]], Any]


def asked(abstract: Mapping[str, Any]) -> list[AskedLeaf]:
    """Describes the requested leaves of some abstract trees.

    A leaf is an array, a `jax.ShapeDtypeStruct` or another object with shape, dtype and
    sharding, and is placed by the sharding (on a device of this host, if it is None);
    an object with only shape and dtype, which becomes an array of NumPy; or a number,
    which becomes one of its type.

    Raises:
      CheckpointError: if a leaf is of another kind.
    """
    return [_asked(path, leaf) for path, leaf in leaves(abstract).items()]


def wanted(abstract: Mapping[str, Any]) -> list[WantedLeaf]:
    """Returns the boxes that this host needs for each leaf of some abstract trees.

    Raises:
      CheckpointError: as `asked`.
    """
    return [_of_this_host(leaf) for leaf in asked(abstract)]


def check(
    asked: Sequence[AskedLeaf],
    contents: Contents,
    *,
    step: int,
    whole: Collection[str] = (),
    skipped: Collection[str] = (),
) -> None:
    """Raises a CheckpointError unless a step has all that is asked, in those shapes.

    Args:
      asked: the leaves.
      contents: of the step.
      step: its number.
      whole: the names of trees of which all leaves that were saved have to be asked.
      skipped: the paths of leaves that need not be.
    """
    saved = {leaf.path: str(list(leaf.shape)) for leaf in contents.leaves}
    now = {contents.listed_path(leaf.path): str(list(leaf.shape)) for leaf in asked}
    needed = {path for path in saved if path.partition("/")[0] in whole}
    needed -= {contents.listed_path(path) for path in skipped}
    kept = {path: saved[path] for path in saved.keys() & (needed | now.keys())}
    check_same_model(f"step {step}", kept, now)


def check_same_model(
    what: str, saved: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Raises an OtherModelError naming the first leaves in which two models differ.

    Args:
      what: the checkpoint, for the message.
      saved: by the path of each leaf, what it was.
      now: by the path of each leaf, what it is.
    """
    differing = [
        f"{path}: saved {saved.get(path, 'nothing')}, now {now.get(path, 'nothing')}"
        for path in sorted(saved.keys() | now.keys())
        if saved.get(path) != now.get(path)
    ]
    if differing:
        shown = "; ".join(differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise errors.OtherModelError(
            f"{what} is a checkpoint of another model: its tree differs from the one"
            f" that was requested ({shown}{more}); request the saved shapes and types,"
            " or start a new run in another directory (with another run_name in a"
            " configuration)"
        )


def rebuilt(tree: Any, name: str, made: Mapping[str, Any]) -> Any:
    """`tree` with the leaves that were made for their paths."""
    paths = list(leaves({name: tree}))
    structure = jax.tree_util.tree_structure(tree)
    return jax.tree_util.tree_unflatten(structure, [made[path] for path in paths])


def _asked(path: str, leaf: Any) -> AskedLeaf:
    if isinstance(leaf, bool | int | float | complex | np.generic):
        kind = type(leaf)
        return AskedLeaf(path=path, shape=(), finish=lambda number: kind(number.item()))
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise errors.CheckpointError(
            f"{path} cannot be restored as a {type(leaf).__name__}; give an array, a"
            " jax.ShapeDtypeStruct with a sharding, a NumPy array or a number"
        )
    if not hasattr(leaf, "sharding"):
        dtype = np.dtype(leaf.dtype)
        return AskedLeaf(
            path=path,
            shape=tuple(leaf.shape),
            dtype=dtype if dtype.isnative else dtype.newbyteorder("="),
        )
    sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _asked_key(path, leaf, sharding)
    return AskedLeaf(
        path=path, shape=tuple(leaf.shape), dtype=leaf.dtype, sharding=sharding
    )


def _asked_key(path: str, leaf: Any, sharding: Sharding) -> AskedLeaf:
    numbers = jax.eval_shape(jax.random.key_data, leaf)
    if isinstance(sharding, NamedSharding):
        more = len(numbers.shape) - len(sharding.spec)
        spec = PartitionSpec(*sharding.spec, *[None] * more)
        sharding = NamedSharding(sharding.mesh, spec)
    impl = _key_impl(leaf)
    return AskedLeaf(
        path=path,
        shape=tuple(numbers.shape),
        dtype=numbers.dtype,
        sharding=sharding,
        finish=lambda data: jax.random.wrap_key_data(data, impl=impl),
    )


def _of_this_host(leaf: AskedLeaf) -> WantedLeaf:
    shape, dtype, sharding = leaf.shape, leaf.dtype, leaf.sharding
    if sharding is None:

        def keep(values: list[np.ndarray]) -> Any:
            (whole,) = values
            as_saved = dtype is None
            return leaf.finish(whole if as_saved else whole.astype(dtype, copy=False))

        return WantedLeaf(
            path=leaf.path, shape=shape, boxes=(boxes.whole(shape),), make=keep
        )
    indices = sharding.addressable_devices_indices_map(shape).values()
    needed = tuple(
        dict.fromkeys(boxes.of_index(index or (), shape) for index in indices)
    )

    def make(values: list[np.ndarray]) -> Any:
        of_box = {
            box: part.astype(dtype, copy=False)
            for box, part in zip(needed, values, strict=True)
        }
        return leaf.finish(
            jax.make_array_from_callback(
                shape,
                sharding,
                lambda index: of_box[boxes.of_index(index or (), shape)],
                dtype=dtype,
            )
        )

    return WantedLeaf(path=leaf.path, shape=shape, boxes=needed, make=make)


def _key_impl(key: Any) -> Any:
    # JAX reports the implementation of keys only, and tracers are keys.
    impls: list[Any] = []
    jax.eval_shape(lambda traced: impls.append(jax.random.key_impl(traced)), key)
    return impls[0]
