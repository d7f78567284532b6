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

`leaves` looks into an encoded state without its classes. A path joins keys, indices and
fields from the top of the state, `groups/0/lr`; that of the state itself is `""`.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from elastic_ckpt.core import errors, storage

Leaf = bool | int | float | str | bytes | np.ndarray
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


def leaves(encoded: Encoded) -> dict[str, Leaf]:
    """The leaves of a state by path.

    Two states have equal leaves if they are equal. The class and length of a container
    are a leaf too, under its path.
    """
    by_path: dict[str, Leaf] = {}
    for path, holder, place in _places([encoded.tree], 0, ""):
        # Keys of a dict may differ in their type alone, or contain slashes.
        while path in by_path:
            path += "'"
        node = holder[place]
        kind, content = _kind(node)
        if kind == "itself":
            by_path[path] = b"null" if node is None else node
        elif kind == "node":
            by_path[path] = content
        elif kind in ("list", "tuple", "dict"):
            by_path[path] = f"a {kind} of {len(content)}"
        elif kind == "float":
            by_path[path] = _float(content)
        elif kind == "bytes":
            by_path[path] = f"{kind} {content}"
        else:
            by_path[path] = encoded.arrays[content]
            by_path[f"{path}/kind"] = f"{kind} {node.get('impl', '')}"
    return by_path


def replaced(encoded: Encoded, path: str, value: Any) -> Encoded:
    """The state with another value of the number or array at a path of `leaves`."""
    top = [copy.deepcopy(encoded.tree)]
    arrays = list(encoded.arrays)
    for there, holder, place in _places(top, 0, ""):
        if there == path and isinstance(value, np.ndarray):
            arrays[_kind(holder[place])[1]] = value
        elif there == path:
            holder[place] = encode(value).tree
    return Encoded(top[0], arrays)


def _places(
    holder: list[Any], place: int, path: str
) -> Iterator[tuple[str, list[Any], int]]:
    # A node and all below it: its path, and its place in a list.
    yield path, holder, place
    node = holder[place]
    kind, content = _kind(node)
    below: list[tuple[Any, list[Any], int]] = []
    if kind in ("list", "tuple"):
        below = [(number, content, number) for number in range(len(content))]
    elif kind == "dict":
        below = [(pair[0], pair, 1) for pair in content]
    elif kind == "node":
        # JAX names fields `.count`, `['lr']`, `[0]`.
        below = [(pair[0].strip(".[]'"), pair, 1) for pair in node["children"]]
    for name, at, number in below:
        yield from _places(at, number, f"{path}/{name}" if path else str(name))


def _kind(node: Any) -> tuple[str, Any]:
    if isinstance(node, list):
        return "list", node
    return next(iter(node.items())) if isinstance(node, dict) else ("itself", node)


def _float(bits: str) -> float:
    return struct.unpack(">d", bytes.fromhex(bits))[0]


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
    below = jax.tree.leaves_with_path(value, is_leaf=lambda node: node is not value)
    if below and not below[0][0]:
        return None
    return {jax.tree_util.keystr(keys): child for keys, child in below}


def _refused(path: str, what: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        f"the state{path} is {what}, which a component cannot save; its values may be"
        " arrays, numbers, texts, bytes, None, and dicts, lists, tuples or pytrees of"
        " them; give the object get_state and set_state that return and take these"
    )


class _Decoder:
    def __init__(self, arrays: Sequence[np.ndarray], *, copies: bool) -> None:
        self._arrays = arrays
        self._copies = copies

    def value(self, node: Any, current: Any, path: str) -> Any:
        kind, content = _kind(node)
        if kind == "itself":
            return node
        if kind == "float":
            return _float(content)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind in ("list", "tuple"):
            of_current = current if isinstance(current, list | tuple) else ()
            places = dict(enumerate(of_current))
            items = [
                self.value(each, places.get(number, _NOTHING), f"{path}[{number}]")
                for number, each in enumerate(content)
            ]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            places = current if isinstance(current, Mapping) else {}
            return {
                key: self.value(each, places.get(key, _NOTHING), f"{path}[{key!r}]")
                for key, each in content
            }
        if kind == "node":
            return self._node(node, current, path)
        array = self._arrays[content]
        if kind == "numpy":
            return np.array(array) if self._copies else array
        if kind == "scalar":
            return array[()]
        placed = _placed(array, current, path, is_key=kind == "key")
        if kind == "key":
            return jax.random.wrap_key_data(placed, impl=node["impl"])
        return placed

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
        structure = jax.tree.structure(current, is_leaf=lambda n: n is not current)
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
