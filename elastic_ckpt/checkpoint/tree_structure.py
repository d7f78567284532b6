"""The structure of trees as text in manifests: how leaves make trees, without values.

    {"shardings": [...], "trees": {"state": {"w": "array 0", "opt": ["int", null]}}}

An object is a dict (a named tuple, a dataclass), a list a list or tuple, null is None,
and a text is a leaf: its kind, and what it takes to make it again.

    array, array 3              an array of JAX, under the sharding with this number
    key threefry2x32            a typed random key; behind it, maybe, its sharding
    numpy                       an array of NumPy
    bool, int, float            a number
    text hello                  a text
    ()                          a tuple without elements

FORMAT.md in `tiers` is the page of the format.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as v0
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.steps.manifest import Contents, Leaf

T = TypeVar("T")

_NUMBERS = {"bool": bool, "int": int, "float": float}
_EMPTY_TUPLE = "()"
# The errors of parsing a text that is not a structure.
_NO_STRUCTURE = (
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


def to_json(checkpointables: Mapping[str, Any]) -> str:
    """The structure of some trees, of which leaves may be abstract."""
    tree = dict(checkpointables)
    # The states of a run differ in their values alone. The types are a part of the key
    # because 0 equals 0.0.
    leaves = tuple(jax.tree.leaves(tree))
    key = (
        _Tree(text=trees.structure_text(tree), tree=tree),
        leaves,
        tuple(map(type, leaves)),
    )
    try:
        hash(key)
    except TypeError:
        return _to_json.__wrapped__(*key)
    return _to_json(*key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tree:
    text: str
    tree: Mapping[str, Any] = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4)
def _to_json(of: _Tree, leaves: tuple[Any, ...], types: tuple[type, ...]) -> str:
    del leaves, types
    checkpointables = of.tree
    shardings: dict[NamedSharding, int] = {}
    structures = {
        name: _structure(tree, shardings) for name, tree in checkpointables.items()
    }
    listed = [orbax_format.sharding_metadata(each) for each in shardings]
    return storage.canonical_json({"shardings": listed, "trees": structures}).decode()


def joined(structures: Iterable[str]) -> str:
    """The structure of the trees of several, as `to_json` makes it of all of them.

    Args:
      structures: what `to_json` returned; each has other trees.
    """
    shardings: list[Any] = []
    structure_of: dict[str, Any] = {}
    for text in structures:
        structure = json.loads(text)
        for name, node in structure["trees"].items():
            renumbered = functools.partial(_renumbered, offset=len(shardings))
            structure_of[name] = jax.tree.map(renumbered, node)
        shardings += structure["shardings"]
    return storage.canonical_json(
        {"shardings": shardings, "trees": structure_of}
    ).decode()


def saved_trees(contents: Contents) -> dict[str, Any]:
    """The trees that were saved, by name, with abstract leaves.

    Arrays have the sharding that they were saved under, if all of its devices exist.
    Texts are texts, and numbers any number of their type.

    Raises:
      CheckpointError: if the manifests describe them in an unsupported way.
    """
    return _trees(contents, _sharding, _on_devices)


def described_trees(contents: Contents) -> dict[str, Any]:
    """As `saved_trees`, for a backup: arrays are `SavedArray`s.

    Raises:
      CheckpointError: likewise.
    """
    return _trees(contents, lambda described: described, orbax_format.SavedArray)


def _trees(
    contents: Contents,
    sharding: Callable[[Mapping[str, Any]], T],
    array: Callable[[tuple[int, ...], Any, T | None], Any],
) -> dict[str, Any]:
    # Makes the trees, and arrays in them under what `sharding` makes of descriptions.
    saved = {leaf.path: leaf for leaf in contents.leaves}
    try:
        structure = json.loads(contents.trees)
        shardings = [sharding(each) for each in structure["shardings"]]

        def made(key_path: trees.KeyPath, node: str) -> Any:
            if node == _EMPTY_TUPLE:
                return ()
            kind, *words = node.split(" ")
            if kind == "text":
                return node.removeprefix("text ")
            if kind in _NUMBERS:
                return _NUMBERS[kind](0)
            name, *keys = key_path
            leaf = saved[trees.leaf_path(name.key, tuple(keys))]
            shape, dtype = leaf.shape, np.dtype(leaf.dtype)
            if kind == "numpy":
                return trees.AbstractArray(shape=shape, dtype=dtype)
            if kind == "key":
                shape, dtype = _key(leaf, words.pop(0))
            return array(shape, dtype, shardings[int(words[0])] if words else None)

        of_name = structure["trees"].items()
        return jax.tree_util.tree_map_with_path(made, dict(of_name))
    except _NO_STRUCTURE as error:
        raise errors.CheckpointError(
            "the manifest of a step has trees that cannot be read"
            f" ({type(error).__name__}: {error}); continue with the program that wrote"
            " it, or restore another step"
        ) from error


def _on_devices(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None
) -> jax.ShapeDtypeStruct:
    if sharding is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        # The numbers that a key consists of have one more dim.
        spec = PartitionSpec(*sharding.spec[: len(shape)])
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _sharding(described: Mapping[str, Any]) -> NamedSharding | None:
    # None if a device of it does not exist any more.
    metadata = v0.metadata.NamedShardingMetadata.from_deserialized_dict(dict(described))
    try:
        return metadata.to_jax_sharding()
    except ValueError:
        return None


def _structure(node: Any, shardings: dict[NamedSharding, int]) -> Any:
    # Node by node, as Orbax names its keys. The numbers of shardings are noted.
    below = jax.tree.leaves_with_path(node, is_leaf=lambda each: each is not node)
    if not below or not below[0][0]:
        return _leaf(node, shardings)
    children = {key: _structure(child, shardings) for (key,), child in below}
    names = [orbax_format.key_name(key) for key in children]
    # An `nnx.List` has keys of both kinds.
    if all(is_item for is_item, _ in names):
        return list(children.values())
    return {
        name: child for (_, name), child in zip(names, children.values(), strict=True)
    }


def _renumbered(node: str, offset: int) -> str:
    # A leaf with `offset` added to the number of its sharding.
    above, _, last = node.rpartition(" ")
    has_sharding = node.startswith(("array ", "key ")) and last.isdecimal()
    return f"{above} {int(last) + offset}" if has_sharding else node


def _leaf(leaf: Any, shardings: dict[NamedSharding, int]) -> Any:
    if orbax_format.is_jax(leaf):
        words = ["array"]
        if orbax_format.is_random_key(leaf):
            words = ["key", orbax_format.random_key_impl(leaf)]
        if _is_of_all_hosts(leaf.sharding):
            words.append(str(shardings.setdefault(leaf.sharding, len(shardings))))
        return " ".join(words)
    if isinstance(leaf, str):
        return f"text {leaf}"
    for name, kind in _NUMBERS.items():
        if isinstance(leaf, kind):
            return name
    if isinstance(leaf, np.ndarray | trees.AbstractArray):
        return "numpy"
    if isinstance(leaf, Mapping):
        return {}
    # Empty named tuples, such as optax's EmptyState, are nothing to Orbax.
    empty = {list: [], tuple: _EMPTY_TUPLE}
    return empty.get(type(leaf))


def _is_of_all_hosts(sharding: Any) -> bool:
    # Arrays on one host's devices only have another name on each host.
    return isinstance(sharding, NamedSharding) and (
        topology.num_hosts() == 1 or not sharding.is_fully_addressable
    )


def _key(leaf: Leaf, impl: str) -> tuple[tuple[int, ...], Any]:
    # The last dims are the numbers of which a key consists.
    one = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    numbers = jax.eval_shape(jax.random.key_data, one)
    return leaf.shape[: len(leaf.shape) - len(numbers.shape)], one.dtype
