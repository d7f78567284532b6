"""The files that Orbax v1 writes next to the values of a checkpoint.

    _CHECKPOINT_METADATA              handlers by checkpointable, times, metadata
    <name>/_METADATA                  the tree of a pytree, and the kinds of its leaves
    <name>/_sharding                  shardings of its JAX arrays
    <name>/_strings.json              its strings
    <name>/array_metadatas/process_0  chunks of its JAX arrays, kinds of random keys
    metrics/metrics                   the metrics by which policies rank steps

Orbax neither documents these files nor offers a function that writes them. The tests
compare them with Orbax's own files, tree by tree, and load them with stock Orbax.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as v0
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.host.trees import (
    AbstractArray,
    KeyPath,
    is_key,
    key_impl,
    leaf_path,
)
from elastic_ckpt.core import errors

# How Orbax numbers the kinds of keys in `_METADATA`.
_SEQUENCE, _DICT = 1, 2
_METRICS = "metrics"


class SavedArray(jax.ShapeDtypeStruct):
    """An abstract array of a saved step; its devices may no longer exist.

    Args:
      shape: the global shape.
      dtype: the dtype of the elements.
      saved_sharding: the sharding, as `sharding_metadata` describes it; None if the
        array was on one device.
      is_weak: whether the array was weakly typed.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        saved_sharding: Mapping[str, Any] | None,
        is_weak: bool,
    ) -> None:
        on_device = SingleDeviceSharding(jax.local_devices()[0])
        sharding = None if saved_sharding else on_device
        super().__init__(shape, dtype, sharding=sharding, weak_type=is_weak)
        self.saved_sharding = saved_sharding


def entries(tree: Any) -> list[tuple[KeyPath, Any]]:
    """A tree's leaves and its empty nodes, which Orbax also records."""
    return jax.tree.leaves_with_path(
        tree, is_leaf=lambda node: jax.tree.structure(node).num_nodes == 1
    )


def key_name(key: Any) -> tuple[bool, str]:
    """Returns whether a key is an index in a sequence, and the key's name in Orbax."""
    is_item = isinstance(
        key, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey
    )
    return is_item, jax.tree_util.keystr((key,), simple=True)


def array_name(key_path: KeyPath) -> str:
    """The name of a leaf in Orbax's stores, such as `params.w`."""
    return ".".join(key_name(key)[1] for key in key_path)


def metadata_files(
    trees: Mapping[str, Any],
    components: Collection[str],
    *,
    chunks: Mapping[str, Sequence[int]],
    init_timestamp_nsecs: int,
    commit_timestamp_nsecs: int,
    metrics: Mapping[str, Any] | None = None,
    custom: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The content of the files that Orbax adds to a step, keyed by path.

    Args:
      trees: pytrees by name. A `jax.ShapeDtypeStruct` with a sharding may replace a JAX
        array.
      components: the names of the checkpointables that are not pytrees; Orbax treats
        them as `StatefulCheckpointable`s.
      chunks: chunk shapes, keyed by leaf path; for typed random keys, the chunk shape
        of their data.
      init_timestamp_nsecs: when the save began, in nanoseconds since 1970.
      commit_timestamp_nsecs: when the step was committed, in nanoseconds since 1970.
      metrics: the metrics by which policies rank steps; None if the step was not
        evaluated.
      custom: the user's metadata, as JSON values.

    Raises:
      CheckpointError: if a leaf has a type that Orbax does not save.
    """
    pytree = handler_name("PyTreeHandler")
    handlers = dict.fromkeys(trees, pytree)
    handlers |= dict.fromkeys(components, handler_name("StatefulCheckpointableHandler"))
    files: dict[str, str] = {}
    for name, tree in trees.items():
        for file, content in tree_files(name, tree, chunks).items():
            files[f"{name}/{file}"] = content
    if metrics is not None:
        handlers[_METRICS] = handler_name("MetricsHandler")
        files[f"{_METRICS}/metrics"] = json.dumps(dict(metrics))
    encoded_metadata = {
        "item_handlers": dict(sorted(handlers.items())),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": init_timestamp_nsecs,
        "commit_timestamp_nsecs": commit_timestamp_nsecs,
        "custom_metadata": dict(custom or {}),
    }
    return {**files, "_CHECKPOINT_METADATA": json.dumps(encoded_metadata)}


def handler_name(name: str) -> str:
    """The name that Orbax v1 stores for a handler, such as `PyTreeHandler`.

    Raises:
      CheckpointError: if this version of Orbax has no such handler.
    """
    for handler, _ in ocp.handlers.global_registry().get_all_entries():
        if handler.__name__ == name:
            return f"{handler.__module__}.{handler.__qualname__}"
    raise errors.CheckpointError(
        f"the installed version of orbax-checkpoint has no handler {name}; install the"
        " version in constraints.txt, which elastic_ckpt was tested with"
    )


def tree_files(
    checkpointable: str, tree: Any, chunks: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """The content of the files that Orbax adds to a tree, keyed by path.

    Raises:
      CheckpointError: see `metadata_files`.
    """
    listed, arrays, shardings, strings = {}, [], {}, {}
    for key_path, leaf in entries(tree):
        name = array_name(key_path)
        kind = leaf_kind(leaf, leaf_path(checkpointable, key_path))
        value: dict[str, Any] = {
            "value_type": kind,
            "skip_deserialize": kind in _EMPTY.values(),
        }
        if kind == "jax.Array":
            chunk = list(chunks[leaf_path(checkpointable, key_path)])
            value["write_shape"] = chunk
            more = {"random_key_impl": str(key_impl(leaf))} if is_key(leaf) else None
            array = {"param_name": name, "write_shape": chunk, "chunk_shape": chunk}
            arrays.append({"array_metadata": {**array, "ext_metadata": more}})
            encoded_metadata = _sharding(leaf)
            if encoded_metadata is not None:
                encoded = base64.urlsafe_b64encode(name.encode()).decode()
                shardings[encoded] = json.dumps(encoded_metadata)
        if kind == "string":
            strings[name] = leaf
        keys = [
            {"key": each, "key_type": _SEQUENCE if is_item else _DICT}
            for is_item, each in map(key_name, key_path)
        ]
        listed[str(tuple(key["key"] for key in keys))] = {
            "key_metadata": keys,
            "value_metadata": value,
        }
    files: dict[str, Any] = {
        "_METADATA": {
            "tree_metadata": listed,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    }
    optional = {
        "array_metadatas/process_0": {"array_metadatas": arrays} if arrays else None,
        "_sharding": shardings,
        "_strings.json": strings_file(strings),
    }
    files |= {path: content for path, content in optional.items() if content}
    return {path: json.dumps(content) for path, content in files.items()}


def strings_file(named: Mapping[str, str]) -> dict[str, Any]:
    """The content of `_strings.json`, where each name is a JSON pointer to its string.

    Raises:
      CheckpointError: if a string would be inside another string.
    """
    content: dict[str, Any] = {}
    for name, text in named.items():
        *above, last = [
            part.replace("~1", "/").replace("~0", "~") for part in name.split("/")
        ]
        node: Any = content
        for part in above:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            raise errors.CheckpointError(
                f"the string {name!r} would be saved inside another string in Orbax's"
                " _strings.json; rename a key that contains '/' or '~'"
            )
        node[last] = text
    return content


_EMPTY = {list: "List", tuple: "Tuple", dict: "Dict", None: "None"}


def is_jax(leaf: Any) -> bool:
    """Whether a leaf is a JAX array, or its abstract form."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def leaf_kind(leaf: Any, path: str) -> str:
    """Orbax's type name for a leaf or empty node.

    Raises:
      CheckpointError: if Orbax does not save the leaf; the message names `path`.
    """
    if is_jax(leaf):
        return "jax.Array"
    if isinstance(leaf, np.ndarray | AbstractArray):
        return "np.ndarray"
    if isinstance(leaf, str):
        return "string"
    if isinstance(leaf, int | float):
        return "scalar"
    if jax.tree.structure(leaf).num_leaves:
        raise errors.CheckpointError(
            f"{path} is of type {type(leaf).__name__}, which Orbax does not save;"
            " convert it to a jax.Array, a NumPy array, an int, a float or a str"
        )
    if isinstance(leaf, Mapping):
        return _EMPTY[dict]
    # Orbax records empty named tuples, such as optax's EmptyState, as None.
    return _EMPTY.get(type(leaf), _EMPTY[None])


def _sharding(leaf: Any) -> dict[str, Any] | None:
    # None for shardings that Orbax does not record.
    sharding, described = leaf.sharding, getattr(leaf, "saved_sharding", None)
    if isinstance(sharding, NamedSharding):
        described = sharding_metadata(sharding)
    if described is not None:
        spec = list(described["partition_spec"])
        if is_key(leaf):
            # A key's data has one more dim, which is not sharded.
            while spec and spec[-1] is None:
                spec.pop()
            spec.append(None)
        return {**described, "partition_spec": spec}
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return {"sharding_type": "SingleDeviceSharding", "device_str": str(device)}
    return None


def sharding_metadata(sharding: NamedSharding) -> dict[str, Any]:
    """Describes a sharding in Orbax's form."""
    metadata = v0.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    return json.loads(metadata.to_serialized_string())
