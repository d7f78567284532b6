"""The state of a component as JSON and arrays, and the file of it.

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
optax, is made from the node that the current state has in its place: nothing is
imported or unpickled by name.

The file is an npz archive. Its entry `state` is a `checked_json` file as bytes; the
entries `0`, `1`, .. are the arrays. Types that NumPy's format lacks, such as bfloat16,
are stored as unsigned integers of their size. The comment at the end of the archive is
the digest of all bytes before it. FORMAT.md is the page of the format.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np
from etils import epath
from jax.sharding import SingleDeviceSharding

from elastic_ckpt.core import checked_json, digest, errors, storage

VERSION = 1
Leaf = bool | int | float | str | bytes | np.ndarray
# Stands for the current state where it lacks the place of a saved value.
_NOTHING = object()
_WHAT = "state of a component"
_STATE = "state"
_DIGEST_LENGTH = 32
_PIECE_BYTES = 2**20
_MOST_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A state at one moment.

    Attributes:
      tree: its structure, JSON, with the values that are no arrays.
      arrays: the others, copies in host memory.
      leaves: all values by their paths, `groups/0/lr`, and under the path of a
        container its type and length. States are equal if these are. Empty if the state
        was read from a file.
    """

    tree: storage.Json
    arrays: Sequence[np.ndarray]
    leaves: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


def encode(state: Any) -> Encoded:
    """Takes a state: later changes of it, or of its arrays, have no effect.

    Raises:
      CheckpointError: if a value cannot be saved; it names the value's path.
    """
    encoder = _Encoder()
    return Encoded(encoder.value(state, ""), encoder.arrays, encoder.leaves)


def decode(encoded: Encoded, current: Any = None) -> Any:
    """Makes the state that `encode` took; it may share the arrays of `encoded`.

    Args:
      encoded: the state.
      current: a state of the same structure, from which nodes of other classes and the
        shardings of arrays are taken.

    Raises:
      CheckpointError: if `current` does not have a node that is needed.
    """
    return _Decoder(encoded.arrays).value(encoded.tree, current, "")


def write(path: epath.Path, encoded: Encoded) -> None:
    """Writes the file of a state, whole or not at all, without a copy of its values."""
    with storage.atomic_path(path) as temporary, open(temporary, "w+b") as file:
        dump(encoded, file)


def dump(encoded: Encoded, file: IO[bytes]) -> None:
    """Writes the content of the file; the same bytes for the same state."""
    # Types of other packages, which NumPy would store without a name.
    foreign = [each.dtype.isbuiltin == 2 for each in encoded.arrays]
    dtypes = [
        each.dtype.name if is_foreign else ""
        for each, is_foreign in zip(encoded.arrays, foreign, strict=True)
    ]
    fields = {"tree": encoded.tree, "dtypes": dtypes}
    text = checked_json.to_bytes(fields, version=VERSION)
    with zipfile.ZipFile(file, "w") as archive:
        _put(archive, _STATE, np.frombuffer(text, np.uint8))
        for number, (values, dtype) in enumerate(
            zip(encoded.arrays, dtypes, strict=True)
        ):
            stored = values.view(f"u{values.itemsize}") if dtype else values
            _put(archive, str(number), stored)
        archive.comment = bytes(_DIGEST_LENGTH)
    value = _file_digest(file)
    file.seek(-_DIGEST_LENGTH, os.SEEK_END)
    file.write(value)


def load(file: IO[bytes]) -> Encoded:
    """The state in the content of a file.

    Raises:
      CheckpointError: if it is cut short, altered, or of another version.
    """
    value = _file_digest(file)
    if value != file.read(_DIGEST_LENGTH + 1):
        raise errors.CheckpointError("is cut short or altered (its digest differs)")
    with zipfile.ZipFile(file) as archive:
        text = _get(archive, _STATE).tobytes()
        fields = checked_json.parse(text, what=_WHAT, version=VERSION)
        arrays = [
            values.view(np.dtype(name)) if name else values
            for number, name in enumerate(fields["dtypes"])
            for values in [_get(archive, str(number))]
        ]
    return Encoded(fields["tree"], arrays)


def read(path: epath.Path) -> Encoded:
    """The state in a file.

    Raises:
      CheckpointError: if the file is missing or `load` rejects it; it names the file.
    """
    try:
        with path.open("rb") as file:
            return load(file)
    except FileNotFoundError:
        raise unreadable(path, "is missing") from None
    except (errors.CheckpointError, checked_json.UnreadableError) as error:
        raise unreadable(path, str(error)) from None


def unreadable(path: epath.Path, problem: str) -> errors.CheckpointError:
    """The error of a file of a component that cannot be read."""
    return errors.CheckpointError(
        f"{_WHAT} {path} {problem}; restore the file from a copy, load another step, or"
        " load without the component (strict=False)"
    )


def type_name(value: Any) -> str:
    """The class of a value with its module, for people."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _file_digest(file: IO[bytes]) -> bytes:
    # Of all bytes before the digest.
    left = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
    file.seek(0)
    hashed = digest.values_hash()
    while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
        hashed.update(piece)
        left -= len(piece)
    return hashed.hexdigest().encode()


def _put(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    # Without the time of the day: equal states have equal bytes.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
        np.lib.format.write_array(file, values, allow_pickle=False)


def _get(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    # NumPy has Python parse the shape and the dtype, which CPython 3.11 now and then
    # fails to do while another thread does it (python/cpython#106905).
    for _ in range(_MOST_ATTEMPTS):
        with contextlib.suppress(SystemError), archive.open(f"{name}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.leaves: dict[str, Leaf] = {}

    def value(self, value: Any, path: str) -> storage.Json:
        kind = type(value)
        if isinstance(value, jax.Array | np.generic) or kind is np.ndarray:
            return self._array(value, path)
        if kind in (list, tuple):
            self._note(path, f"a {kind.__name__} of {len(value)}")
            items = [self.value(each, f"{path}/{n}") for n, each in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind is dict:
            self._note(path, f"a dict of {len(value)}")
            pairs = [
                [_key(k, path), self.value(v, f"{path}/{k}")] for k, v in value.items()
            ]
            return {"dict": pairs}
        encoded: storage.Json = value
        if kind is float and not np.isfinite(value):
            encoded = {"float": struct.pack(">d", value).hex()}
        elif kind is bytes:
            encoded = {"bytes": base64.b64encode(value).decode()}
        elif value is not None and kind not in (bool, int, float, str):
            return self._node(value, path)
        is_leaf = isinstance(encoded, bool | int | float | str)
        self._note(path, encoded if is_leaf else repr(encoded).encode())
        return encoded

    def _note(self, path: str, leaf: Leaf) -> None:
        path = path.removeprefix("/")
        # Keys of a dict may differ in their type alone, or contain slashes.
        while path in self.leaves:
            path += "'"
        self.leaves[path] = leaf

    def _array(self, value: Any, path: str) -> storage.Json:
        node: dict[str, storage.Json] = {"array": len(self.arrays)}
        if not isinstance(value, jax.Array):
            if value.dtype.hasobject:
                raise _refused(path, "an array of Python objects")
            kind = "numpy" if type(value) is np.ndarray else "scalar"
            node = {kind: len(self.arrays)}
        elif not value.is_fully_addressable:
            if not value.is_fully_replicated:
                raise errors.CheckpointError(
                    f"the state{path} is an array whose parts are on several hosts,"
                    " which belongs with the weights: save it in a pytree beside the"
                    " components"
                )
            # Every host has all of it: no other one takes part.
            value = value.addressable_shards[0].data
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            node = {"key": len(self.arrays), "impl": str(jax.random.key_impl(value))}
            value = jax.random.key_data(value)
        self.arrays.append(np.array(value))
        self._note(path, self.arrays[-1])
        self._note(f"{path}/kind", " ".join([*node, str(node.get("impl", ""))]))
        return node

    def _node(self, value: Any, path: str) -> storage.Json:
        children = _children(value)
        if children is None:
            raise _refused(path, f"a {type_name(value)}")
        self._note(path, type_name(value))
        pairs: list[storage.Json] = [
            [name, self.value(child, _below(path, name))]
            for name, child in children.items()
        ]
        return {"node": type_name(value), "children": pairs}


def _key(key: Any, path: str) -> storage.Json:
    if type(key) not in (bool, int, str, type(None)):
        raise _refused(path, f"a dict with the key {key!r}, a {type(key).__name__}")
    return key


def _children(value: Any) -> dict[str, Any] | None:
    # One level of a pytree; None if the value is a leaf.
    below = jax.tree.leaves_with_path(value, is_leaf=lambda node: node is not value)
    if below and not below[0][0]:
        return None
    return {jax.tree_util.keystr(keys): child for keys, child in below}


def _below(path: str, name: str) -> str:
    # JAX names fields `.count`, `['lr']`, `[0]`.
    return f"{path}/" + name.strip(".[]'")


def _refused(path: str, what: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        f"the state{path} is {what}, which a component cannot save; its values may be"
        " arrays, numbers, texts, bytes, None, and dicts, lists, tuples or pytrees of"
        " them; give the object get_state and set_state that return and take these"
    )


class _Decoder:
    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    def value(self, node: Any, current: Any, path: str) -> Any:
        if isinstance(node, list):
            node = {"list": node}
        if not isinstance(node, dict):
            return node
        kind, content = next(iter(node.items()))
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind in ("list", "tuple"):
            of_current = current if isinstance(current, list | tuple) else ()
            places = dict(enumerate(of_current))
            items = [
                self.value(each, places.get(number, _NOTHING), f"{path}/{number}")
                for number, each in enumerate(content)
            ]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            places = current if isinstance(current, Mapping) else {}
            return {
                key: self.value(each, places.get(key, _NOTHING), f"{path}/{key}")
                for key, each in content
            }
        if kind == "node":
            return self._node(node, current, path)
        array = self._arrays[content]
        if kind == "numpy":
            return array
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
            self.value(child, of_current[name], _below(path, name))
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
