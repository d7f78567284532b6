"""The structure of the trees of a step, without values.

Manifests have the structure as text:

    {"shardings": [...], "trees": {"state": {"w": "array 0", "opt": ["int", null]}}}

An object is a dict (a named tuple, a dataclass), a list a list or tuple, null is None,
and a text is a leaf: its kind, and what it takes to make it again.

    array, array 3              an array of JAX, under the sharding with this number
    key threefry2x32            a typed random key; behind it, maybe, its sharding
    numpy                       an array of NumPy
    bool, int, float            a number
    text hello                  a text
    ()                          a tuple without elements

FORMAT.md in `steps` is the page of the format.

A step that RAM accepts and Orbax rejects could never be backed up. So a save rejects,
before anything is captured, what Orbax rejects: leaves of other types, and trees
without a leaf. It also rejects two leaves that Orbax would write under one name, since
one would be lost, and trees that manifests cannot describe.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as v0
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import digest, errors, storage, topology
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


# Names of Orbax's own, and of files that lie beside the directories of checkpointables.
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
# The text of the structure of trees that were checked, by it and their leaves: the
# states of a run differ in their values alone.
_MOST_KNOWN = 64
_known: dict[Any, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostNotes:
    """Notes that hosts may have made differently; those of host 0 count.

    Attributes:
      metrics: that the step is saved with, as JSON text; None if there are none.
      custom_metadata: that a user added, as JSON text; None if there is nothing.
      texts: the leaves of the trees that are texts.
      parts_digest: of `StepDescription.kinds`, which may not differ.
    """

    metrics: str | None
    custom_metadata: str | None
    texts: tuple[str, ...]
    parts_digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDescription:
    """A step without its values.

    Attributes:
      trees: pytrees by name, with abstract arrays, and any number for a number.
      components: the names of other parts, ordered.
      metrics_json: the metrics that it was saved with, as text.
      custom_json: the metadata that a user added, as text.
      init_timestamp_nsecs: when its save began, since 1970.
    """

    trees: Mapping[str, Any]
    components: Sequence[str]
    metrics_json: str | None
    custom_json: str | None
    init_timestamp_nsecs: int

    @classmethod
    def from_trees(
        cls,
        checkpointables: Mapping[str, Any],
        components: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None,
        custom_metadata: Mapping[str, Any] | None,
    ) -> StepDescription:
        """Describes the trees and components; holds no reference to an array.

        Raises:
          CheckpointError: if a leaf cannot be saved, or metrics or custom metadata are
            not JSON.
        """
        if not (checkpointables or components):
            raise errors.CheckpointError(
                "no checkpointables were given, so there is nothing to save; give at"
                " least one"
            )
        for name in [*checkpointables, *components]:
            _check_name(name)
        abstract = {
            name: jax.tree.map(_abstract, tree)
            for name, tree in checkpointables.items()
        }
        _checked_json(abstract)
        return cls(
            trees=abstract,
            components=sorted(components),
            metrics_json=None if metrics is None else json_of_user("metrics", metrics),
            custom_json=None
            if custom_metadata is None
            else json_of_user("custom metadata", custom_metadata),
            init_timestamp_nsecs=time.time_ns(),
        )

    @classmethod
    def from_contents(cls, contents: Contents) -> StepDescription:
        """Describes a step that was saved, by its manifests.

        Raises:
          CheckpointError: if they describe its trees in an unsupported way.
        """
        return cls(
            trees=described_trees(contents),
            components=sorted(contents.components),
            metrics_json=contents.metrics,
            custom_json=contents.custom_metadata,
            init_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    @property
    def metrics(self) -> Any:
        """The metrics that it was saved with; None if there are none."""
        return None if self.metrics_json is None else json.loads(self.metrics_json)

    @property
    def custom_metadata(self) -> Any:
        """The metadata that a user added; None if there is nothing."""
        return None if self.custom_json is None else json.loads(self.custom_json)

    def host_notes(self, kinds: Mapping[str, str]) -> HostNotes:
        """The notes that hosts compare, or that those of host 0 replace.

        Args:
          kinds: of what this host saves.
        """
        leaves = jax.tree.leaves(self.trees)
        return HostNotes(
            metrics=self.metrics_json,
            custom_metadata=self.custom_json,
            texts=tuple(leaf for leaf in leaves if isinstance(leaf, str)),
            parts_digest=digest.json_digest(dict(kinds)),
        )

    def kinds(self, components: Mapping[str, str]) -> dict[str, str]:
        """By the path of a leaf or the name of a component, what this host saves.

        Args:
          components: by name, what they are.
        """
        kinds = {
            trees.leaf_path(name, keys): _kind(leaf)
            for name, tree in self.trees.items()
            for keys, leaf in jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda each: each is None
            )[0]
        }
        return kinds | dict(components)

    def agreed(self, notes: HostNotes) -> StepDescription:
        """This step with the notes of host 0, which are those of the step."""
        texts = iter(notes.texts)
        return dataclasses.replace(
            self,
            trees=jax.tree.map(
                lambda leaf: next(texts) if isinstance(leaf, str) else leaf, self.trees
            ),
            metrics_json=notes.metrics,
            custom_json=notes.custom_metadata,
        )

    def without(self, components: Collection[str]) -> StepDescription:
        """This step without some components."""
        left = [name for name in self.components if name not in components]
        return dataclasses.replace(self, components=left)

    def contents(self, parents: Sequence[StepId], **more: Any) -> Contents:
        """The contents of manifests of it, as a save with these parents.

        Args:
          parents: see `Contents`.
          **more: the fields that it does not know.
        """
        return Contents(
            components=tuple(self.components),
            metrics=self.metrics_json,
            custom_metadata=self.custom_json,
            trees=_checked_json(self.trees),
            parents=tuple(parents),
            **more,
        )

    def files(self, chunks: Chunks) -> dict[str, str]:
        """The files that Orbax adds to the values, by path, as of now.

        Args:
          chunks: by the path of a leaf, the shape of its chunks.
        """
        files = orbax_format.metadata_files(
            self.trees,
            self.components,
            chunks=chunks,
            step=orbax_format.StepMetadata(
                init_timestamp_nsecs=self.init_timestamp_nsecs,
                commit_timestamp_nsecs=time.time_ns(),
                metrics=self.metrics,
                custom=self.custom_metadata,
            ),
        )
        return {path: content.decode() for path, content in files.items()}


def json_of_user(what: str, value: Mapping[str, Any]) -> str:
    """The JSON of metrics or metadata that a user gives.

    Raises:
      CheckpointError: if it is not JSON; the message begins with `what`.
    """
    try:
        text = storage.canonical_json(dict(value)).decode()
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.CheckpointError(
            f"the {what} {str(value)[:200]} are not JSON ({error}); give plain numbers,"
            " such as float(loss), texts, lists and dicts"
        ) from None
    return text


def to_json(checkpointables: Mapping[str, Any]) -> str:
    """The structure of some trees, of which leaves may be abstract."""
    shardings: dict[NamedSharding, int] = {}
    structures = {
        name: _structure(tree, shardings) for name, tree in checkpointables.items()
    }
    listed = [orbax_format.sharding_metadata(each) for each in shardings]
    return storage.canonical_json({"shardings": listed, "trees": structures}).decode()


def _checked_json(checkpointables: Mapping[str, Any]) -> str:
    # As `to_json`, of trees that can be saved.
    leaves = tuple(jax.tree.leaves(checkpointables))
    # 0 equals 0.0.
    key = trees.structure_text(checkpointables), leaves, tuple(map(type, leaves))
    try:
        text = _known.get(key)
    except TypeError:
        # A leaf that cannot be saved, or an array of a backup.
        key = text = None
    if text is None:
        for name, tree in checkpointables.items():
            _check_tree(name, tree)
        text = to_json(checkpointables)
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = text
    return text


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


def _check_name(name: str) -> None:
    refused = name in ("", ".", "..") or "/" in name or name in _RESERVED
    if refused or is_manifest_name(name) or not _is_unicode(name):
        raise errors.CheckpointError(
            f"the name {name!r} cannot be used for a checkpointable: it becomes the"
            f" name of a directory, and {sorted(_RESERVED)} are reserved; choose"
            " another name"
        )


def _check_tree(checkpointable: str, tree: Any) -> None:
    entries = orbax_format.entries(tree)
    if not jax.tree.leaves(tree) and not tree:
        raise errors.CheckpointError(
            f"{checkpointable!r} is empty, and Orbax does not save it; leave it out"
        )
    paths: dict[str, str] = {}
    texts: dict[str, str] = {}
    for key_path, leaf in entries:
        path = trees.leaf_path(checkpointable, key_path)
        kind = orbax_format.leaf_kind(leaf, path)
        if kind in orbax_format.EMPTY_KINDS:
            continue
        name = orbax_format.array_name(key_path)
        if not _is_unicode(name):
            raise errors.CheckpointError(
                f"the name of the leaf {path!r} is not Unicode, and no tier can store"
                " it; rename its key"
            )
        prefix = ocdbt.array_prefix(name)
        if prefix in paths:
            raise errors.CheckpointError(
                f"the leaves {paths[prefix]!r} and {path!r} would both be saved as"
                f" {name!r} in Orbax, and one of them lost; rename a key with a '.'"
            )
        paths[prefix] = path
        if kind == "string":
            texts[name] = path
    orbax_format.strings_file(texts)
    written = [leaf for _, leaf in entries if isinstance(leaf, str)]
    unstorable = [text for text in written if not _is_unicode(text)]
    if unstorable:
        raise errors.CheckpointError(
            f"a text of {checkpointable!r} is not Unicode, and no tier can store it:"
            f" {unstorable[0]!r}"
        )
    try:
        to_json({checkpointable: tree})
    except Exception as error:  # raised by the nodes of a user's library
        raise errors.CheckpointError(
            f"the structure of {checkpointable!r} cannot be saved"
            f" ({type(error).__name__}: {error}); give a tree of dicts, lists and"
            " arrays, such as nnx.state(model)"
        ) from error


# What describes an array, by its shape, its dtype, and the identity of its sharding,
# which is kept with it. From step to step an array mostly has the same one, and a
# comparison of shardings takes longer than all the rest.
_structs: dict[tuple[Any, ...], jax.ShapeDtypeStruct] = {}
_MOST_STRUCTS = 2**17


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    key = array.shape, array.dtype, id(array.sharding)
    known = _structs.get(key)
    if known is None:
        if len(_structs) >= _MOST_STRUCTS:
            _structs.clear()
        known = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        _structs[key] = known
    return known


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return _struct(leaf)
    if isinstance(leaf, np.ndarray):
        return trees.AbstractArray(shape=leaf.shape, dtype=leaf.dtype)
    for kind in (bool, int, float):
        if isinstance(leaf, kind):
            return kind(0)
    return leaf


def _kind(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


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


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
