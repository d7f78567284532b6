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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.steps.manifest import Contents, Leaf, escaped

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


@dataclasses.dataclass(frozen=True)
class Text:
    """A text among the leaves of a tree, which is in manifests as it is.

    Attributes:
      value: the text.
    """

    value: str


def to_json(checkpointables: Mapping[str, Any]) -> str:
    """The structure of some trees, of which leaves may be abstract."""
    leaves, structure = jax.tree.flatten(dict(checkpointables))
    # The states of a run differ in their values alone. The types are a part of the key
    # because 0 equals 0.0.
    key = (structure, tuple(leaves), tuple(map(type, leaves)))
    try:
        hash(key)
    except TypeError:
        return _to_json.__wrapped__(*key)
    return _to_json(*key)


@functools.lru_cache(maxsize=4)
def _to_json(structure: Any, leaves: tuple[Any, ...], types: tuple[type, ...]) -> str:
    del types
    checkpointables = jax.tree.unflatten(structure, leaves)
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
            structure_of[name] = _renumbered(node, len(shardings))
        shardings += structure["shardings"]
    return storage.canonical_json(
        {"shardings": shardings, "trees": structure_of}
    ).decode()


def saved_trees(contents: Contents) -> dict[str, Any]:
    """The trees that were saved, by name, with abstract leaves.

    Arrays have the sharding that they were saved under, if all of its devices exist.
    Texts are `Text`s. From manifests without structures all containers are dicts, and
    all leaves arrays.

    Raises:
      CheckpointError: if the manifests describe them in an unsupported way.
    """
    return _trees(contents, lambda listed: _OnDevices(map(_sharding, listed)))


def described_trees(contents: Contents) -> dict[str, Any]:
    """As `saved_trees`, for a backup: texts are texts, and arrays are `SavedArray`s.

    Raises:
      CheckpointError: likewise.
    """
    trees = _trees(contents, _AsSaved)
    return jax.tree.map(_unwrapped, trees)


class _OnDevices:
    """Makes abstract arrays on devices that exist."""

    def __init__(self, shardings: Iterable[Sharding | None]) -> None:
        self._shardings = list(shardings)

    def array(self, shape: tuple[int, ...], dtype: Any, number: int | None) -> Any:
        """An array under the sharding of a number, if there is one."""
        sharding = None if number is None else self._shardings[number]
        if sharding is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            sharding = _of_keys(sharding, len(shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


class _AsSaved:
    """Makes abstract arrays with the description of their sharding."""

    def __init__(self, shardings: Sequence[Mapping[str, Any]]) -> None:
        self._shardings = shardings

    def array(self, shape: tuple[int, ...], dtype: Any, number: int | None) -> Any:
        """An array with the sharding of a number, if there is one."""
        sharding = None if number is None else self._shardings[number]
        return orbax_format.SavedArray(shape, dtype, sharding)


def _trees(
    contents: Contents,
    arrays: Callable[[Sequence[Mapping[str, Any]]], _OnDevices | _AsSaved],
) -> dict[str, Any]:
    if contents.trees is None:
        return _nested(contents)
    leaves = {leaf.path: leaf for leaf in contents.leaves}
    try:
        structure = json.loads(contents.trees)
        made = arrays(structure["shardings"])
        return {
            name: _tree(node, name, leaves, made)
            for name, node in structure["trees"].items()
        }
    except _NO_STRUCTURE as error:
        raise errors.CheckpointError(
            "the manifest of a step has trees that cannot be read"
            f" ({type(error).__name__}: {error}); continue with the program that wrote"
            " it, or restore another step"
        ) from error


def _structure(tree: Any, shardings: dict[NamedSharding, int]) -> Any:
    # Node by node, as Orbax names its keys.
    entries = orbax_format.entries(tree)
    # Nodes with a key that is not an index. An `nnx.List` has keys of both kinds.
    objects = {
        key_path[:depth]
        for key_path, _ in entries
        for depth, key in enumerate(key_path)
        if not orbax_format.key_name(key)[0]
    }
    root: list[Any] = [None]
    made: dict[tuple[Any, ...], Any] = {}
    for key_path, leaf in entries:
        parent: Any = root
        place: Any = 0
        for depth, key in enumerate(key_path):
            _, name = orbax_format.key_name(key)
            at = key_path[:depth]
            if at not in made:
                made[at] = {} if at in objects else []
                _put(parent, place, made[at])
            parent, place = made[at], name
        _put(parent, place, _leaf(leaf, shardings))
    return root[0]


def _renumbered(node: Any, offset: int) -> Any:
    # The structure of a tree, with `offset` added to the numbers of its shardings.
    if isinstance(node, dict):
        return {key: _renumbered(child, offset) for key, child in node.items()}
    if isinstance(node, list):
        return [_renumbered(child, offset) for child in node]
    if node is None or not node.startswith(("array ", "key ")):
        return node
    above, _, last = node.rpartition(" ")
    return f"{above} {int(last) + offset}" if last.isdecimal() else node


def _put(parent: Any, place: Any, node: Any) -> None:
    if isinstance(parent, list) and int(place) == len(parent):
        parent.append(node)
    elif isinstance(parent, list):
        parent[int(place)] = node
    else:
        parent[place] = node


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


def _tree(
    node: Any, path: str, leaves: Mapping[str, Leaf], arrays: _OnDevices | _AsSaved
) -> Any:
    if isinstance(node, dict):
        return {
            key: _tree(child, f"{path}/{escaped(key)}", leaves, arrays)
            for key, child in node.items()
        }
    if isinstance(node, list):
        return [
            _tree(child, f"{path}/{n}", leaves, arrays) for n, child in enumerate(node)
        ]
    if node is None:
        return None
    if node == _EMPTY_TUPLE:
        return ()
    kind, *words = node.split(" ")
    if kind == "text":
        return Text(node.removeprefix("text "))
    if kind in _NUMBERS:
        return _NUMBERS[kind](0)
    leaf = leaves[path]
    if kind == "numpy":
        return trees.AbstractArray(shape=leaf.shape, dtype=np.dtype(leaf.dtype))
    if kind == "key":
        shape, dtype = _key(leaf, words.pop(0))
    else:
        shape, dtype = leaf.shape, np.dtype(leaf.dtype)
    return arrays.array(shape, dtype, int(words[0]) if words else None)


def _key(leaf: Leaf, impl: str) -> tuple[tuple[int, ...], Any]:
    # The last dims are the numbers of which a key consists.
    one = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    numbers = jax.eval_shape(jax.random.key_data, one)
    return leaf.shape[: len(leaf.shape) - len(numbers.shape)], one.dtype


def _of_keys(sharding: Sharding, rank: int) -> Sharding:
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:rank]))


def _sharding(metadata: Mapping[str, Any]) -> Sharding | None:
    devices = {device.id: device for device in jax.devices()}
    mesh = np.array(metadata["device_mesh"]["mesh"], object)
    ids = [each["id"] for each in mesh.flat]
    if not devices.keys() >= set(ids):
        return None
    grid = np.array([devices[each] for each in ids], object).reshape(metadata["shape"])
    axes = [
        tuple(each) if isinstance(each, list) else each
        for each in metadata["partition_spec"]
    ]
    types = tuple(AxisType[each.rpartition(".")[2]] for each in metadata["axis_types"])
    named = Mesh(grid, metadata["axis_names"], axis_types=types)
    return NamedSharding(named, PartitionSpec(*axes))


def _unwrapped(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Text) else leaf


def _nested(contents: Contents) -> dict[str, Any]:
    structure: dict[str, Any] = {}
    for leaf in contents.leaves:
        *above, last = leaf.path.split("/")
        node = structure
        for key in above:
            node = node.setdefault(key, {})
        node[last] = _array(leaf)
    return structure


def _array(leaf: Leaf) -> Any:
    # One of NumPy if JAX would narrow it in this process.
    dtype = np.dtype(leaf.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return trees.AbstractArray(shape=leaf.shape, dtype=dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
