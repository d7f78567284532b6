"""What Orbax v1 writes beside the values of a checkpoint, made without saving one.

    _CHECKPOINT_METADATA              handlers by part, times, custom metadata
    <part>/_METADATA                  the tree of a pytree, and the kinds of its leaves
    <part>/_sharding                  shardings of its JAX arrays
    <part>/_strings.json              its strings
    <part>/array_metadatas/process_0  chunks of its JAX arrays, kinds of random keys
    metrics/metrics                   what policies rank steps by

Orbax describes none of this and offers no function for it. Files are compared with
Orbax's own, tree by tree, in the tests; what loads them is stock Orbax.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import ocdbt

KeyPath = tuple[Any, ...]

# How Orbax numbers the kinds of keys in `_METADATA`.
_SEQUENCE, _DICT = 1, 2
_METRICS = "metrics"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """What Orbax notes of a step as a whole.

    Attributes:
      init_timestamp_nsecs: when its save began, since 1970.
      commit_timestamp_nsecs: when it was committed, since 1970.
      metrics: what policies rank it by; None if it was not evaluated.
      custom: whatever a user wants to find again, as JSON.
    """

    init_timestamp_nsecs: int
    commit_timestamp_nsecs: int
    metrics: Mapping[str, Any] | None = None
    custom: Mapping[str, Any] | None = None


def stored_arrays(
    checkpointables: Mapping[str, Any], chunks: Mapping[str, Sequence[int]]
) -> dict[str, ocdbt.StoredArray]:
    """Where Orbax looks for each leaf, by the leaf's path in manifests.

    Args:
      checkpointables: pytrees by name; leaves may be abstract.
      chunks: by the path of a leaf (`state/params/w`), the shape of its chunks.

    Raises:
      CheckpointError: if two leaves have the same path or the same name in Orbax.
    """
    found: dict[str, ocdbt.StoredArray] = {}
    names: dict[tuple[str, str], str] = {}
    for checkpointable, tree in checkpointables.items():
        for key_path, leaf in jax.tree.leaves_with_path(tree):
            if isinstance(leaf, str):
                continue
            path = leaf_path(checkpointable, key_path)
            name = _name(key_path)
            if path in found or (checkpointable, name) in names:
                raise errors.CheckpointError(
                    f"two leaves of {checkpointable!r} would be saved under one name"
                    f" ({path!r}, in Orbax {name!r}): rename the key that contains a"
                    " '/' or '.'"
                )
            names[checkpointable, name] = path
            found[path] = ocdbt.StoredArray(
                checkpointable=checkpointable, name=name, chunk=tuple(chunks[path])
            )
    return found


def leaf_path(checkpointable: str, key_path: KeyPath) -> str:
    """The path of a leaf in manifests, such as `state/params/w`."""
    below = jax.tree_util.keystr(key_path, simple=True, separator="/")
    return f"{checkpointable}/{below}" if key_path else checkpointable


def metadata_files(
    checkpointables: Mapping[str, Any],
    components: Collection[str],
    *,
    chunks: Mapping[str, Sequence[int]],
    step: StepMetadata,
) -> dict[str, bytes]:
    """The files of a step that Orbax adds to the values, by path.

    Args:
      checkpointables: pytrees by name. In place of a JAX array may stand a
        `jax.ShapeDtypeStruct` with its sharding.
      components: the names of other parts, `StatefulCheckpointable`s to Orbax.
      chunks: by the path of a leaf, the shape of its chunks; of typed random keys, of
        their data.
      step: the rest.

    Raises:
      CheckpointError: if a leaf is of a type that Orbax does not save.
    """
    pytree = _handler("PyTreeHandler")
    handlers = dict.fromkeys(checkpointables, pytree)
    handlers |= dict.fromkeys(components, _handler("StatefulCheckpointableHandler"))
    files: dict[str, bytes] = {}
    for name, tree in checkpointables.items():
        for file, content in _tree_files(name, tree, chunks).items():
            files[f"{name}/{file}"] = json.dumps(content).encode()
    if step.metrics is not None:
        handlers[_METRICS] = _handler("MetricsHandler")
        files[f"{_METRICS}/metrics"] = json.dumps(dict(step.metrics)).encode()
    described = {
        "item_handlers": dict(sorted(handlers.items())),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": step.init_timestamp_nsecs,
        "commit_timestamp_nsecs": step.commit_timestamp_nsecs,
        "custom_metadata": dict(step.custom or {}),
    }
    return {**files, "_CHECKPOINT_METADATA": json.dumps(described).encode()}


def _handler(name: str) -> str:
    # How Orbax names a handler on disk, by those that it has registered.
    for handler, _ in ocp.handlers.global_registry().get_all_entries():
        if handler.__name__ == name:
            return f"{handler.__module__}.{handler.__qualname__}"
    raise errors.CheckpointError(
        f"this version of orbax-checkpoint has no handler {name}; install the one that"
        " elastic_ckpt was tested with (constraints.txt)"
    )


def _tree_files(
    checkpointable: str, tree: Any, chunks: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    entries, arrays, shardings, strings = {}, [], {}, {}
    for key_path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_entry):
        name = _name(key_path)
        kind = _kind(leaf, leaf_path(checkpointable, key_path))
        value: dict[str, Any] = {
            "value_type": kind,
            "skip_deserialize": kind in _EMPTY.values(),
        }
        if kind == "jax.Array":
            chunk = list(chunks[leaf_path(checkpointable, key_path)])
            value["write_shape"] = chunk
            arrays.append(_array(name, leaf, chunk))
            described = _sharding(leaf)
            if described is not None:
                encoded = base64.urlsafe_b64encode(name.encode()).decode()
                shardings[encoded] = json.dumps(described)
        if kind == "string":
            strings[name] = leaf
        keys = tuple(_key(key) for key in key_path)
        entries[str(tuple(key["key"] for key in keys))] = {
            "key_metadata": keys,
            "value_metadata": value,
        }
    files: dict[str, Any] = {
        "_METADATA": {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    }
    if arrays:
        files["array_metadatas/process_0"] = {"array_metadatas": arrays}
    if shardings:
        files["_sharding"] = shardings
    if strings:
        files["_strings.json"] = strings
    return files


def _is_entry(node: Any) -> bool:
    # Leaves, and nodes without children: Orbax notes those too.
    return jax.tree.structure(node).num_nodes == 1


def _name(key_path: KeyPath) -> str:
    return ".".join(_key(key)["key"] for key in key_path)


def _key(key: Any) -> dict[str, Any]:
    if isinstance(key, jax.tree_util.SequenceKey):
        return {"key": str(key.idx), "key_type": _SEQUENCE}
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return {"key": str(key.key), "key_type": _SEQUENCE}
    if isinstance(key, jax.tree_util.GetAttrKey):
        return {"key": key.name, "key_type": _DICT}
    return {"key": str(key.key), "key_type": _DICT}


_EMPTY = {list: "List", tuple: "Tuple", dict: "Dict", None: "None"}


def _kind(leaf: Any, path: str) -> str:
    # Orbax's name of the type of a leaf or empty node.
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return "jax.Array"
    if isinstance(leaf, np.ndarray):
        return "np.ndarray"
    if isinstance(leaf, str):
        return "string"
    if isinstance(leaf, int | float):
        return "scalar"
    if jax.tree.structure(leaf).num_leaves:
        raise errors.CheckpointError(
            f"{path} is a {type(leaf).__name__}, which Orbax does not save; make it a"
            " jax.Array, a NumPy array, an int, a float or a str"
        )
    if isinstance(leaf, Mapping):
        return _EMPTY[dict]
    # Empty named tuples, such as optax's EmptyState, are nothing to Orbax.
    return _EMPTY.get(type(leaf), _EMPTY[None])


def _is_random_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _array(name: str, leaf: Any, chunk: list[int]) -> dict[str, Any]:
    more = None
    if _is_random_key(leaf):
        # Of abstract keys only a traced function can ask.
        kinds: list[Any] = []
        jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), leaf)
        more = {"random_key_impl": str(kinds[0])}
    described = {
        "param_name": name,
        "write_shape": chunk,
        "chunk_shape": chunk,
        "ext_metadata": more,
    }
    return {"array_metadata": described}


def _sharding(leaf: Any) -> dict[str, Any] | None:
    # None of shardings that Orbax notes nothing of.
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        ids = np.vectorize(lambda device: {"id": device.id}, otypes=[object])
        spec = list(sharding.spec)
        if _is_random_key(leaf):
            # Its data has one more dim, which is whole everywhere.
            while spec and spec[-1] is None:
                spec.pop()
            spec.append(None)
        return {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(each) for each in mesh.axis_types],
            "partition_spec": spec,
            "device_mesh": {"mesh": ids(mesh.devices).tolist()},
        }
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return {"sharding_type": "SingleDeviceSharding", "device_str": str(device)}
    return None
