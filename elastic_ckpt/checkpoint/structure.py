"""The structure of a step's trees, without values.

Manifests store the structure as text:

    {"shardings": [...], "trees": {"state": {"w": "array 0", "opt": ["int", null]}}}

An object is a dict, named tuple or dataclass; a list is a list or tuple; null is None;
and a string is a leaf: its kind, and any details needed to create it.

    array, array 3              a JAX array, with the index of its sharding, if any
    weak, weak 3                the same, weakly typed
    key threefry2x32            a typed random key, also with the index of a sharding
    numpy                       a NumPy array
    bool, int, float            a number
    text hello                  a string
    ()                          a tuple without elements

FORMAT.md in `steps` describes the format.

`resolve` matches the tree that a restore requests with the saved tree. In place of each
leaf, the request has the form in which to restore the leaf: an abstract array, a number
or a number type, or `str`; an array type, to restore an array as it was saved; or `...`
or None, to skip the leaf, which then stays in the result.

A step that fits into RAM but that Orbax rejects could never be backed up. So before
anything is captured, a save rejects everything that Orbax rejects: leaves of other
types, and trees without leaves. It also rejects two leaves that Orbax would write under
the same name, because one would be lost, and trees that manifests cannot describe.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as v0
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors, storage, topology
from elastic_ckpt.steps.manifest import Contents, Leaf, is_manifest_name
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import (
    ocdbt,
    orbax_view,
    persistent_root,
)
from elastic_ckpt.tiers.ram import ram_disk

T = TypeVar("T")
Chunks = Mapping[str, Sequence[int]]

# The abstract form of leaves without saved arrays; the value of a number is arbitrary.
_NUMBERS = (bool, int, float)
_PLAIN = {"bool": False, "int": 0, "float": 0.0, "()": ()}
# How manifests represent the empty nodes that Orbax records.
_EMPTY = {"List": [], "Tuple": "()", "Dict": {}, "None": None}
# The errors that are raised when text that is not a structure is parsed.
_NO_STRUCTURE = (
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


# Names that Orbax reserves, and names of files next to checkpointable directories.
_RESERVED = frozenset(
    {
        "AUTO",
        "_CHECKPOINT_DELETION",
        "_CHECKPOINT_METADATA",
        "metrics",
        orbax_view.FILE,
        persistent_root.COMMIT_FILE,
        preserved.FILE,
        ram_disk.RESERVED,
    }
)
# Caches the text of checked trees, keyed by structure and leaves, because a run's
# states usually differ only in their values.
_MOST_KNOWN = 64
_known: dict[Any, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDescription:
    """A step without its values.

    Attributes:
      trees: pytrees by name, with abstract arrays; the values of numbers are arbitrary.
      contents: the contents, as in the step's manifests; without leaves until the step
        is written.
      init_timestamp_nsecs: when the save began, in nanoseconds since 1970.
    """

    trees: Mapping[str, Any]
    contents: Contents
    init_timestamp_nsecs: int

    @classmethod
    def from_trees(
        cls,
        checkpointables: Mapping[str, Any],
        components: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
        parents: Sequence[StepId] = (),
    ) -> StepDescription:
        """Describes trees and components without keeping references to arrays.

        Raises:
          CheckpointError: if a leaf cannot be saved, or the metrics or custom metadata
            cannot be encoded as JSON.
        """
        if not (checkpointables or components):
            raise errors.CheckpointError(
                "no checkpointables were passed, so there is nothing to save; pass at"
                " least one"
            )
        for name in [*checkpointables, *components]:
            _check_name(name)
        abstract = jax.tree.map(_abstract, dict(checkpointables))
        contents = Contents(
            leaves=(),
            components=tuple(sorted(components)),
            metrics=None if metrics is None else json_of_user("metrics", metrics),
            custom_metadata=None
            if custom_metadata is None
            else json_of_user("custom metadata", custom_metadata),
            trees=_checked_json(abstract),
            parents=tuple(parents),
        )
        return cls(
            trees=abstract, contents=contents, init_timestamp_nsecs=time.time_ns()
        )

    @classmethod
    def from_contents(cls, contents: Contents) -> StepDescription:
        """Describes a saved step from its manifests.

        Raises:
          CheckpointError: if the manifests describe the trees in an unsupported way.
        """
        trees = _trees(contents, lambda described: described, orbax_format.SavedArray)
        return cls(
            trees=trees,
            contents=contents,
            init_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    @property
    def metrics(self) -> Any:
        """The step's metrics; None if there are none."""
        return json.loads(self.contents.metrics or "null")

    @property
    def custom_metadata(self) -> Any:
        """The user's metadata; None if there is none."""
        return json.loads(self.contents.custom_metadata or "null")

    def kinds(self, components: Mapping[str, str]) -> dict[str, str]:
        """The kinds of values to save, keyed by leaf path or component name."""
        leaves = _with_none(self.trees).items()
        return {path: _kind(leaf) for path, leaf in leaves} | dict(components)

    def changed(self, **fields: Any) -> StepDescription:
        """Returns a copy with some fields of the contents changed."""
        contents = dataclasses.replace(self.contents, **fields)
        return dataclasses.replace(self, contents=contents)

    def files(self, chunks: Chunks) -> dict[str, str]:
        """The content of Orbax's metadata files, committed now, keyed by path."""
        return orbax_format.metadata_files(
            self.trees,
            self.contents.components,
            chunks=chunks,
            init_timestamp_nsecs=self.init_timestamp_nsecs,
            commit_timestamp_nsecs=time.time_ns(),
            metrics=self.metrics,
            custom=self.custom_metadata,
        )


def json_of_user(what: str, value: Mapping[str, Any]) -> str:
    """Encodes a user's metrics or metadata as JSON.

    Raises:
      CheckpointError: if the value cannot be encoded; the message begins with
        `the <what>`.
    """
    try:
        text = storage.canonical_json(dict(value)).decode()
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"the {what} {str(value)[:200]} cannot be encoded as JSON ({error}); pass"
            " only plain numbers, such as float(loss), strings, lists and dicts"
        ) from None
    return text


def to_json(checkpointables: Mapping[str, Any]) -> str:
    """Encodes the structure of trees, whose leaves may be abstract, as JSON."""
    shardings: dict[NamedSharding, int] = {}
    structures = {
        name: _structure(tree, shardings) for name, tree in checkpointables.items()
    }
    listed = [orbax_format.sharding_metadata(each) for each in shardings]
    return storage.canonical_json({"shardings": listed, "trees": structures}).decode()


def _checked_json(abstract: Mapping[str, Any]) -> str:
    # Like `to_json`, but rejects trees that cannot be saved.
    leaves = jax.tree.leaves(abstract)
    named = [each if orbax_format.is_jax(each) else repr(each) for each in leaves]
    key = (trees.structure_text(abstract), *named)
    if key not in _known:
        for name, tree in abstract.items():
            _check_tree(name, tree)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        try:
            _known[key] = to_json(abstract)
        except Exception as error:  # by nodes of a user's library
            raise errors.CheckpointError(
                f"the structure of {sorted(abstract)} cannot be saved"
                f" ({type(error).__name__}: {error}); pass trees of dicts, lists and"
                " arrays, such as nnx.state(model)"
            ) from error
    return _known[key]


def saved_trees(contents: Contents) -> dict[str, Any]:
    """The saved trees with abstract leaves, by name, and None for each component.

    Arrays have their saved sharding, if all of its devices exist. Strings have their
    values; numbers have an arbitrary value of their type.

    Raises:
      CheckpointError: if the manifests describe the trees in an unsupported way.
    """
    named = dict.fromkeys(contents.components)
    return named | _trees(contents, _sharding, _on_devices)


def _trees(
    contents: Contents,
    made_sharding: Callable[[Mapping[str, Any]], T],
    array: Callable[[tuple[int, ...], Any, T | None, bool], Any],
) -> dict[str, Any]:
    # `made_sharding` and `array` create the shardings and arrays of the trees.
    saved = {leaf.path: leaf for leaf in contents.leaves}
    try:
        structure = json.loads(contents.trees)
        shardings = [made_sharding(each) for each in structure["shardings"]]

        def made(key_path: trees.KeyPath, node: str) -> Any:
            if node in _PLAIN:
                return _PLAIN[node]
            kind, *words = node.split(" ")
            if kind == "text":
                return node.removeprefix("text ")
            name, *keys = key_path
            leaf = saved[trees.leaf_path(name.key, tuple(keys))]
            shape, dtype = leaf.shape, np.dtype(leaf.dtype)
            if kind == "numpy":
                return trees.AbstractArray(shape=shape, dtype=dtype)
            if kind == "key":
                shape, dtype = _key(leaf, words.pop(0))
            sharding = shardings[int(words[0])] if words else None
            return array(shape, dtype, sharding, kind == "weak")

        of_name = structure["trees"].items()
        return jax.tree_util.tree_map_with_path(made, dict(of_name))
    except _NO_STRUCTURE as error:
        raise errors.CheckpointError(
            "a step's manifest describes trees that cannot be read here"
            f" ({type(error).__name__}: {error}); use the version of elastic_ckpt that"
            " saved the step, or restore a different step"
        ) from error


def _on_devices(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None, is_weak: bool
) -> jax.ShapeDtypeStruct:
    if sharding is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        # A key's data has one more dim.
        spec = PartitionSpec(*sharding.spec[: len(shape)])
        sharding = NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=is_weak)


def _sharding(described: Mapping[str, Any]) -> NamedSharding | None:
    # None if one of its devices no longer exists.
    metadata = v0.metadata.NamedShardingMetadata.from_deserialized_dict(dict(described))
    try:
        return metadata.to_jax_sharding()
    except ValueError:
        return None


def _structure(node: Any, shardings: dict[NamedSharding, int]) -> Any:
    # Recurses node by node, with keys named as in Orbax. Adds new shardings to
    # `shardings`.
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


def _check_name(name: str) -> None:
    refused = name in ("", ".", "..") or "/" in name or name in _RESERVED
    refused |= any(each.search(name) for each in storage.NOT_IN_TENSORSTORE.values())
    if refused or is_manifest_name(name):
        raise errors.CheckpointError(
            f"{name!r} cannot be the name of a checkpointable: the name must be a valid"
            f" directory name and none of the reserved names {sorted(_RESERVED)};"
            " choose a different name"
        )


def _check_tree(checkpointable: str, tree: Any) -> None:
    if not jax.tree.leaves(tree) and not tree:
        raise errors.CheckpointError(
            f"{checkpointable!r} is empty, so Orbax does not save it; omit it"
        )
    paths: dict[str, str] = {}
    texts: dict[str, str] = {}
    for key_path, leaf in orbax_format.entries(tree):
        path = trees.leaf_path(checkpointable, key_path)
        kind = orbax_format.leaf_kind(leaf, path)
        name = orbax_format.array_name(key_path)
        text = f"{name}{leaf}" if kind == "string" else name
        if text.encode(errors="ignore").decode() != text:
            raise errors.CheckpointError(
                f"the name or the value of leaf {path!r} is not valid Unicode, so no"
                " tier can store it; remove the invalid characters"
            )
        if kind in _EMPTY:
            continue
        prefix = ocdbt.array_prefix(name)
        if prefix in paths:
            raise errors.CheckpointError(
                f"the leaves {paths[prefix]!r} and {path!r} would both be saved as"
                f" {name!r} in Orbax, so one would be lost; rename a key that contains"
                " '.'"
            )
        paths[prefix] = path
        if kind == "string":
            texts[name] = path
    orbax_format.strings_file(texts)


# Cached, because an array usually has the same sharding in every step.
_struct = functools.lru_cache(maxsize=2**17)(jax.ShapeDtypeStruct)


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        weak = trees.is_weak(leaf)
        return _struct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)
    if isinstance(leaf, np.ndarray):
        return trees.AbstractArray(shape=leaf.shape, dtype=leaf.dtype)
    return next((kind(0) for kind in _NUMBERS if isinstance(leaf, kind)), leaf)


def _kind(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = "weak " if trees.is_weak(leaf) else ""
        return f"{weak}{leaf.dtype}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, str) else type(leaf).__name__


def _leaf(leaf: Any, shardings: dict[NamedSharding, int]) -> Any:
    kind = orbax_format.leaf_kind(leaf, "a leaf")
    if kind == "jax.Array":
        words = ["weak" if trees.is_weak(leaf) else "array"]
        if trees.is_key(leaf):
            words = ["key", str(trees.key_impl(leaf))]
        if _is_of_all_hosts(leaf.sharding):
            words.append(str(shardings.setdefault(leaf.sharding, len(shardings))))
        return " ".join(words)
    if kind == "scalar":
        return next(each.__name__ for each in _NUMBERS if isinstance(leaf, each))
    return {**_EMPTY, "np.ndarray": "numpy", "string": f"text {leaf}"}[kind]


def _is_of_all_hosts(sharding: Any) -> bool:
    # If an array is only on one host's devices, its sharding differs between hosts.
    return isinstance(sharding, NamedSharding) and (
        topology.num_hosts() == 1 or not sharding.is_fully_addressable
    )


def _key(leaf: Leaf, impl: str) -> tuple[tuple[int, ...], Any]:
    # The last dims are a key's data.
    one = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    numbers = jax.eval_shape(jax.random.key_data, one)
    return leaf.shape[: len(leaf.shape) - len(numbers.shape)], one.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTrees:
    """Requested trees.

    Attributes:
      read: trees of the leaves that hosts read, keyed by name; None in place of other
        leaves.
      given: trees of all requested leaves, keyed by name.
    """

    read: Mapping[str, Any]
    given: Mapping[str, Any]

    def filled(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """The requested trees, with the values that hosts have read."""
        return jax.tree.map(
            lambda given, read, value: given if read is None else value,
            dict(self.given),
            dict(self.read),
            {name: made[name] for name in self.given},
            is_leaf=_is_none,
        )


def resolve(
    asked: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    what: str,
    partial: bool,
    may_add: bool = True,
) -> AskedTrees:
    """Determines which leaves hosts read for the requested trees.

    Args:
      asked: trees by name; None requests a whole tree as it was saved.
      saved: all checkpointables of the step, as `saved_trees` or
        `foreign_steps.read_checkpointables` describes them.
      what: the step, as named in messages.
      partial: whether the request may omit saved leaves.
      may_add: whether, if `partial` is set, the request may have leaves that were not
        saved; they stay unchanged.

    Raises:
      CheckpointError: if the step lacks a leaf, or has it in a different form; the
        message names the leaf.
    """
    missing = sorted(name for name in asked if saved.get(name) is None)
    if missing:
        raise errors.CheckpointError(
            f"{what} contains no pytrees named {missing}; it contains {sorted(saved)}."
            " Request only these, and for each component pass an object that can load"
            " it"
        )
    abstract = {n: saved[n] if tree is None else tree for n, tree in asked.items()}
    leaves = trees.leaves({name: saved[name] for name in asked})
    resolved = {
        path: _resolved(path, leaf, leaves.get(path), may_add=partial and may_add)
        for path, leaf in _with_none(abstract).items()
    }
    structure = jax.tree.structure(abstract, is_leaf=_is_none)
    given = structure.unflatten([stays for stays, _ in resolved.values()])
    read = structure.unflatten([form for _, form in resolved.values()])
    texts = {path for path in resolved if isinstance(leaves.get(path), str)}
    now = dict.fromkeys(texts, _shape("")) | {
        leaf.path: str(list(leaf.shape)) for leaf in trees.asked(read)
    }
    kept = {
        path: _shape(leaf)
        for path, leaf in leaves.items()
        if path in now or not (partial or path in resolved)
    }
    trees.check_same_model(what, kept, now)
    return AskedTrees(read=read, given=given)


def is_other(name: str, tree: Any, saved: Mapping[str, Any]) -> bool:
    """Whether a requested tree differs from the saved one; see `resolve`."""
    try:
        resolve({name: tree}, saved, what="the step", partial=False)
    except errors.CheckpointError:
        return True
    return False


def _shape(leaf: Any) -> str:
    # The shape of a saved leaf, as `trees.asked` returns that of a requested one.
    if isinstance(leaf, str):
        return "text"
    if trees.is_key(leaf):
        # A key is saved as its data.
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return str(list(getattr(leaf, "shape", ())))


def _is_none(node: Any) -> bool:
    return node is None


def _with_none(named: Mapping[str, Any]) -> dict[str, Any]:
    # The leaves, including None, keyed by path.
    leaves = jax.tree.leaves_with_path(dict(named), is_leaf=_is_none)
    return {trees.leaf_path(keys[0].key, keys[1:]): leaf for keys, leaf in leaves}


def _resolved(
    path: str,
    leaf: Any,
    was: Any,
    *,
    may_add: bool,
) -> tuple[Any, Any]:
    # The leaf's placeholder until hosts have read it, and the leaf that they read.
    if leaf is None or leaf is ...:
        return leaf, None
    if was is None:
        # If that is an error, `check_same_model` reports it.
        return leaf, None if may_add else leaf
    if isinstance(was, str) != (leaf is str or isinstance(leaf, str)):
        raise errors.CheckpointError(
            f"{path} was saved as {was!r} and cannot be restored as {leaf!r}; request"
            " `str` for strings, and only for strings"
        )
    if isinstance(was, str):
        return was, None
    return leaf, _form(path, leaf, was)


def _form(path: str, leaf: Any, was: Any) -> Any:
    # The abstract leaf to read for a saved array or number.
    if isinstance(leaf, type):
        if issubclass(leaf, bool | int | float):
            return leaf(0)
        shape = getattr(was, "shape", ())
        dtype = was.dtype if hasattr(was, "dtype") else np.asarray(was).dtype
        if issubclass(leaf, np.ndarray) and not trees.is_key(was):
            return trees.AbstractArray(shape=shape, dtype=dtype)
        if not issubclass(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise errors.CheckpointError(
                f"{path} cannot be restored as {leaf.__name__}; pass jax.Array,"
                " np.ndarray, bool, int, float or str, or an abstract array"
            )
        leaf = jax.ShapeDtypeStruct(shape, dtype, weak_type=trees.is_weak(was))
    if trees.is_key(leaf) and trees.is_key(was) and leaf.dtype != was.dtype:
        raise errors.CheckpointError(
            f"{path} is a random key that was saved as {was.dtype} but requested"
            f" as {leaf.dtype}, which yields different numbers; request the saved"
            " implementation (see jax_default_prng_impl)"
        )
    are_abstract = all(isinstance(each, jax.ShapeDtypeStruct) for each in (leaf, was))
    if are_abstract and leaf.sharding is None:
        # Without a requested sharding, an array keeps the saved one.
        return leaf.update(sharding=was.sharding)
    return leaf
