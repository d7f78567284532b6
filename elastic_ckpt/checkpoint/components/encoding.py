"""States as JSON and arrays of NumPy, and back with the same bits and types.

    null, true, 3, 0.5, "text"              as they are
    [..]                                    a list
    {"tuple": [..]}, {"dict": [[key, value], ..]}
    {"float": "7ff8000000000000"}           a float that JSON lacks, by its bits
    {"bytes": "AAE="}                       in base64
    {"numpy": 0}, {"scalar": 0}             an array or a scalar of NumPy
    {"array": 0}                            an array of JAX
    {"key": 0, "impl": "threefry2x32"}      an array of typed random keys
    {"node": "module.Class", "children": [[name, value], ..]}
                                            another node of a pytree

The numbers are those of the arrays. A node of another class, such as a named tuple of
optax, is made of the node that the current state has in its place: nothing is imported
or unpickled by its name.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from elastic_ckpt.core import errors, storage

# Stands for the current state where it lacks the place of a saved value.
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A state at one moment.

    Attributes:
      tree: its structure, JSON, with the values that are no arrays.
      arrays: the others, copies in host memory.
    """

    tree: storage.Json
    arrays: Sequence[np.ndarray]


def encode(state: Any) -> Encoded:
    """Takes a state: later changes of it, or of its arrays, have no effect.

    Raises:
      CheckpointError: if a value cannot be saved; it names the value's path.
    """
    arrays: list[np.ndarray] = []
    return Encoded(_encode(state, "", arrays), arrays)


def decode(encoded: Encoded, current: Any = None, *, is_last: bool = False) -> Any:
    """Makes the state that `encode` took.

    Args:
      encoded: the state.
      current: a state of the same structure, from which nodes of other classes and the
        shardings of arrays are taken.
      is_last: whether the arrays may be those of `encoded`, which is not used again.

    Raises:
      CheckpointError: if `current` does not have a node that is needed.
    """
    return _Decoder(encoded.arrays, copies=not is_last).value(encoded.tree, current, "")


def type_name(value: Any) -> str:
    """The class of a value with its module, for people."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _encode(value: Any, path: str, arrays: list[np.ndarray]) -> storage.Json:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if np.isfinite(value):
            return value
        return {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return _items(value, path, arrays)
    if kind is tuple:
        return {"tuple": _items(value, path, arrays)}
    if kind is dict:
        return {
            "dict": [
                [_key(key, path), _encode(each, f"{path}[{key!r}]", arrays)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, jax.Array):
        return _jax_array(value, path, arrays)
    if kind is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject:
            raise _refused(path, "an array of Python objects")
        arrays.append(np.array(value))
        return {"numpy" if kind is np.ndarray else "scalar": len(arrays) - 1}
    return _node(value, path, arrays)


def _items(
    values: Sequence[Any], path: str, arrays: list[np.ndarray]
) -> list[storage.Json]:
    return [
        _encode(each, f"{path}[{number}]", arrays) for number, each in enumerate(values)
    ]


def _key(key: Any, path: str) -> storage.Json:
    if type(key) not in (bool, int, str, type(None)):
        raise _refused(path, f"a dict with the key {key!r}, a {type(key).__name__}")
    return key


def _jax_array(value: jax.Array, path: str, arrays: list[np.ndarray]) -> storage.Json:
    if not value.is_fully_addressable:
        if not value.is_fully_replicated:
            raise errors.CheckpointError(
                f"the state{path} is an array whose parts are on several hosts, which"
                " belongs with the weights: save it in a pytree beside the components"
            )
        # Every host has all of it: no other one takes part.
        value = value.addressable_shards[0].data
    number = len(arrays)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        arrays.append(np.array(jax.random.key_data(value)))
        return {"key": number, "impl": str(jax.random.key_impl(value))}
    arrays.append(np.array(value))
    return {"array": number}


def _node(value: Any, path: str, arrays: list[np.ndarray]) -> storage.Json:
    children = _children(value)
    if children is None:
        raise _refused(path, f"a {type_name(value)}")
    return {
        "node": type_name(value),
        "children": [
            [name, _encode(child, f"{path}{name}", arrays)]
            for name, child in children.items()
        ],
    }


def _children(value: Any) -> dict[str, Any] | None:
    # One level of a pytree; None if the value is a leaf.
    def is_child(node: Any) -> bool:
        return node is not value

    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_child)
    if leaves and not leaves[0][0]:
        return None
    return {jax.tree_util.keystr(keys): child for keys, child in leaves}


def _refused(path: str, what: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        f"the state{path} is {what}, which a component cannot save; its values may be"
        " arrays, numbers, texts, bytes, None, and dicts, lists, tuples or pytrees of"
        " them; give the object get_state and set_state that return and take these"
    )


class _Decoder:
    def __init__(self, arrays: Sequence[np.ndarray], *, copies: bool) -> None:
        self._arrays = list(arrays)
        self._copies = copies

    def value(self, node: Any, current: Any, path: str) -> Any:
        if isinstance(node, list):
            return self._items(node, current, path)
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(node["float"]))[0]
        if kind == "bytes":
            return base64.b64decode(node["bytes"], validate=True)
        if kind == "tuple":
            return tuple(self._items(node["tuple"], current, path))
        if kind == "dict":
            of_current = current if isinstance(current, Mapping) else {}
            return {
                key: self.value(each, of_current.get(key, _NOTHING), f"{path}[{key!r}]")
                for key, each in node["dict"]
            }
        if kind == "node":
            return self._node(node, current, path)
        array = self._arrays[node[kind]]
        if kind == "numpy":
            return np.array(array) if self._copies else array
        if kind == "scalar":
            return array[()]
        if kind == "key":
            data = _placed(array, current, path, is_key=True)
            return jax.random.wrap_key_data(data, impl=node["impl"])
        return _placed(array, current, path, is_key=False)

    def _items(self, nodes: Sequence[Any], current: Any, path: str) -> list[Any]:
        of_current = current if isinstance(current, list | tuple) else ()
        return [
            self.value(
                node,
                of_current[number] if number < len(of_current) else _NOTHING,
                f"{path}[{number}]",
            )
            for number, node in enumerate(nodes)
        ]

    def _node(self, node: Mapping[str, Any], current: Any, path: str) -> Any:
        of_current = None if current is _NOTHING else _children(current)
        names = [name for name, _ in node["children"]]
        if type_name(current) != node["node"] or list(of_current or ()) != names:
            now = "nothing" if current is _NOTHING else f"a {type_name(current)}"
            raise errors.CheckpointError(
                f"the state{path} was saved as a {node['node']} with {names}, and the"
                f" current state has {now} with {list(of_current or ())} there; make"
                " the state with the same classes and fields before it is loaded"
            )
        assert of_current is not None
        children = [
            self.value(child, of_current[name], f"{path}{name}")
            for name, child in node["children"]
        ]

        def is_child(each: Any) -> bool:
            return each is not current

        structure = jax.tree.structure(current, is_leaf=is_child)
        return jax.tree.unflatten(structure, children)


def _placed(array: np.ndarray, current: Any, path: str, *, is_key: bool) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise errors.CheckpointError(
            f"the state{path} was saved as an array of {array.dtype}, which JAX narrows"
            " in this process; set jax_enable_x64"
        )
    if (
        isinstance(current, jax.Array)
        and not isinstance(current.sharding, SingleDeviceSharding)
        and (current.is_fully_replicated if is_key else current.shape == array.shape)
    ):
        return jax.make_array_from_callback(
            array.shape, current.sharding, lambda index: array[index]
        )
    return jax.numpy.array(array)
