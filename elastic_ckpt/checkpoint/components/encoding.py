"""Encodes a component's state as JSON and arrays, and reads and writes its file.

    null, true, 3, 0.5, "text"              the same value
    [..]                                    a list
    {"tuple": [..]}, {"dict": [[key, value], ..]}
    {"float": "7ff8000000000000"}           a non-finite float, as its bits
    {"bytes": "AAE="}                       bytes, in base64
    {"numpy": 0}, {"scalar": 0}             a NumPy array or scalar
    {"array": 0}, {"weak": 0}               a JAX array, a weakly typed one
    {"key": 0, "impl": "threefry2x32"}      an array of typed random keys
    {"node": "module.Class", "children": [[name, value], ..]}
                                            any other pytree node

The integers are indices of arrays. A node of any other class, such as an optax named
tuple, is built from the node at the same place in the current state: nothing is
imported or unpickled by name. A list has no fixed places, because it may be longer than
the current state's list, so a node in a list is refused.

The file is an npz archive. Its entry `state` is a `checked_json` file as bytes; the
entries `0`, `1`, ... are the arrays. Types that NumPy's format lacks, such as bfloat16,
are stored as unsigned integers of the same size. The comment at the end of the archive
is the digest of all bytes before it. FORMAT.md describes the format.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import SingleDeviceSharding
from numpy.lib import format as stored

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import checked_json, digest, errors, storage

VERSION = 1
# Marks where the current state lacks a saved value.
_NOTHING = object()
_WHAT = "state of a component"
_DIGEST_LENGTH = 32
_PIECE_BYTES = 2**20
_MOST_ATTEMPTS = 10
# What a load reads under Python's limits for recursion and for digits.
_MOST_LEVELS = 100
_MOST_BITS = 14_000


class Encoded(NamedTuple):
    """A snapshot of a state.

    Attributes:
      tree: the state's structure, with all values that are not arrays.
      arrays: copies of the state's arrays in host memory.
    """

    tree: storage.Json
    arrays: Sequence[np.ndarray]


def encode(state: Any) -> Encoded:
    """Encodes a copy of a state; later changes to the state do not affect the copy.

    Raises:
      CheckpointError: if a value cannot be saved; the message names its path.
    """
    arrays: list[np.ndarray] = []
    return Encoded(_encoded(state, "", arrays), arrays)


def decode(encoded: Encoded, current: Any = None) -> Any:
    """Decodes a state; the result may share arrays with `encoded`.

    Args:
      encoded: the result of `encode`.
      current: a state of the same structure, from which array shardings and pytree
        nodes of other classes are taken.

    Raises:
      CheckpointError: if `current` lacks a node.
    """
    return _decoded(encoded.tree, current, "", encoded.arrays)


def write(path: epath.Path, encoded: Encoded) -> None:
    """Writes a state file atomically, without copying values."""
    with storage.atomic_path(path) as temporary, open(temporary, "w+b") as file:
        dump(encoded, file)


def dump(encoded: Encoded, file: IO[bytes]) -> None:
    """Writes the file's content; identical states have identical bytes."""
    # Names of dtypes from other packages, which NumPy would not store.
    dtypes = [
        each.dtype.name if each.dtype.isbuiltin == 2 else "" for each in encoded.arrays
    ]
    entries = {
        str(number): values.view(f"u{values.itemsize}") if dtype else values
        for number, (values, dtype) in enumerate(
            zip(encoded.arrays, dtypes, strict=True)
        )
    }
    fields: dict[str, storage.Json] = {"tree": encoded.tree, "dtypes": [*dtypes]}
    text = checked_json.to_bytes(fields, version=VERSION)
    np.savez(file, allow_pickle=False, state=np.frombuffer(text, np.uint8), **entries)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = bytes(_DIGEST_LENGTH)
    value = _file_digest(file)
    file.seek(-_DIGEST_LENGTH, os.SEEK_END)
    file.write(value)


def load(file: IO[bytes]) -> Encoded:
    """Reads the state in a file.

    Raises:
      UnreadableError: if the file is truncated or altered, or has a different version.
    """
    value = _file_digest(file)
    if value != file.read(_DIGEST_LENGTH + 1):
        raise checked_json.UnreadableError(
            "is truncated or altered (its digest differs)"
        )
    with np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
        text = _entry(archive, "state").tobytes()
        fields = checked_json.parse(text, what=_WHAT, version=VERSION)
        arrays = [
            values.view(name) if name else values
            for number, name in enumerate(fields["dtypes"])
            for values in [_entry(archive, str(number))]
        ]
    return Encoded(fields["tree"], arrays)


def read(path: epath.Path, parse: Callable[[IO[bytes]], Any] = load) -> Any:
    """Reads a component file.

    Args:
      path: the file path.
      parse: a function that parses the open file; the default, `load`, reads a state.

    Raises:
      CheckpointError: if the file is missing or `parse` rejects it; the message names
        the file.
    """
    try:
        with path.open("rb") as file:
            return parse(file)
    except FileNotFoundError:
        problem = "is missing"
    except ValueError as error:
        problem = str(error)
    raise errors.CheckpointError(
        f"component file {path} {problem}; restore the file from a good copy, load a"
        " different step, or load without this component (strict=False)"
    )


def type_name(value: Any) -> str:
    """A value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def on_host(value: Any) -> Any:
    """Copies an array or random key to host memory; returns any other value."""
    if isinstance(value, jax.Array):
        # Every host has the whole replicated array, so it does not need other hosts.
        local = value if value.is_fully_addressable else value.addressable_data(0)
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        value = jax.device_get(jax.random.key_data(local) if is_key else local)
    return np.array(value) if isinstance(value, np.ndarray | np.generic) else value


def _file_digest(file: IO[bytes]) -> bytes:
    # The digest of all bytes before the stored digest.
    left = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
    file.seek(0)
    hashed = digest.values_hash()
    while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
        hashed.update(piece)
        left -= len(piece)
    return hashed.hexdigest().encode()


def _entry(archive: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    # NumPy parses shape and dtype with Python's parser, which sometimes fails in
    # CPython 3.11 while another thread is using it (python/cpython#106905).
    for _ in range(_MOST_ATTEMPTS):
        with contextlib.suppress(SystemError):
            return archive[name]
    return archive[name]


def _encoded(
    value: Any, path: str, arrays: list[np.ndarray], *, in_list: bool = False
) -> storage.Json:
    kind = type(value)
    encoded = functools.partial(_encoded, arrays=arrays, in_list=in_list)
    if path.count("/") > _MOST_LEVELS:
        raise _refused(path, f"nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, jax.Array | np.generic) or kind is np.ndarray:
        arrays.append(on_host(value))
        return _array(value, path, len(arrays) - 1, arrays[-1])
    if kind is list:
        numbered = enumerate(value)
        return [_encoded(v, f"{path}/{n}", arrays, in_list=True) for n, v in numbered]
    if kind is tuple:
        return {"tuple": [encoded(v, f"{path}/{n}") for n, v in enumerate(value)]}
    if kind is dict:
        pairs: list[storage.Json] = []
        for key, each in value.items():
            if type(key) not in (bool, int, str, type(None)):
                raise _refused(
                    path, f"a dict with the key {key!r} of type {type_name(key)}"
                )
            pairs.append([key, encoded(each, f"{path}/{key}")])
        return {"dict": pairs}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is float and not np.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if kind is int and value.bit_length() > _MOST_BITS:
        raise _refused(path, f"an integer of more than {_MOST_BITS} bits")
    if value is None or kind in (bool, int, float, str):
        return value
    children = _children(value)
    if children is None:
        raise _refused(path, f"of type {type_name(value)}")
    if in_list:
        raise _refused(
            path,
            f"a {type_name(value)} in a list, which may be longer than the list of the"
            " program that loads it",
        )
    nodes: list[storage.Json] = [
        [name, encoded(child, _below(path, name))] for name, child in children.items()
    ]
    return {"node": type_name(value), "children": nodes}


def _array(
    value: Any, path: str, number: int, held: np.ndarray
) -> dict[str, storage.Json]:
    if not isinstance(value, jax.Array):
        if value.dtype.hasobject:
            raise _refused(path, "an array of Python objects")
        is_scalar, dtype = isinstance(value, np.generic), value.dtype
        described = stored.dtype_to_descr(dtype)
        # NumPy's format lacks some types of fields, and zeros end its scalar texts.
        if (
            isinstance(value, np.record)
            or (is_scalar and held[()].dtype != dtype)
            or (dtype.isbuiltin != 2 and stored.descr_to_dtype(described) != dtype)
        ):
            raise _refused(
                path,
                f"of type {type_name(value)} with dtype {dtype}, which NumPy's files"
                " change",
            )
        return {"scalar" if is_scalar else "numpy": number}
    if not (value.is_fully_addressable or value.is_fully_replicated):
        raise errors.CheckpointError(
            f"the state{path} is an array spread across hosts, so it belongs with the"
            " weights: save it in a pytree, not in a component"
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": number, "impl": str(jax.random.key_impl(value))}
    return {"weak" if value.weak_type else "array": number}


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
        f"the state{path} is {what}, which a component cannot save. Use arrays,"
        " numbers, strings, bytes, None, and dicts, lists, tuples or other pytrees of"
        " these (in lists, only dicts, lists and tuples); or define get_state, which"
        " returns such values, and set_state, which accepts them, on the object"
    )


def _decoded(node: Any, current: Any, path: str, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(node, list):
        node = {"list": node}
    if not isinstance(node, dict):
        return node

    def below(saved: Any, places: Mapping[Any, Any], key: Any, name: str) -> Any:
        return _decoded(saved, places.get(key, _NOTHING), name, arrays)

    match next(iter(node.items())):
        case "float", content:
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "bytes", content:
            return base64.b64decode(content, validate=True)
        case "list" | "tuple" as kind, content:
            places = enumerate(current if isinstance(current, list | tuple) else ())
            of_current = dict(places)
            items = [
                below(each, of_current, n, f"{path}/{n}")
                for n, each in enumerate(content)
            ]
            return items if kind == "list" else tuple(items)
        case "dict", content:
            of_current = current if isinstance(current, Mapping) else {}
            return {k: below(v, of_current, k, f"{path}/{k}") for k, v in content}
        case "node", _:
            names = [name for name, _ in node["children"]]
            children = {} if current is _NOTHING else _children(current) or {}
            if type_name(current) != node["node"] or list(children) != names:
                now = "nothing" if current is _NOTHING else f"type {type_name(current)}"
                raise errors.CheckpointError(
                    f"the state{path} was saved as type {node['node']} with {names},"
                    f" but the current state has {now} with {list(children)} in its"
                    " place; before loading, create the state with the same classes and"
                    " fields"
                )
            made = [
                below(child, children, name, _below(path, name))
                for name, child in node["children"]
            ]
            structure = jax.tree.structure(current, is_leaf=lambda n: n is not current)
            return jax.tree.unflatten(structure, made)
        case "numpy", number:
            return arrays[number]
        case "scalar", number:
            return arrays[number][()]
        case kind, number:
            impl = node.get("impl")
            placed = _placed(arrays[number], current, path, is_key=impl is not None)
            if kind == "weak":
                return trees.weakly_typed(placed)
            return jax.random.wrap_key_data(placed, impl=impl) if impl else placed


def _placed(array: np.ndarray, current: Any, path: str, *, is_key: bool) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise errors.CheckpointError(
            f"the state{path} was saved as an array of {array.dtype}, which JAX would"
            " narrow in this process; to keep the dtype, set jax_enable_x64"
        )
    if (
        isinstance(current, jax.Array)
        and not isinstance(current.sharding, SingleDeviceSharding)
        and (current.is_fully_replicated if is_key else current.shape == array.shape)
    ):
        # A program may have disallowed implicit transfers, such as this one.
        with jax.transfer_guard("allow"):
            return jax.make_array_from_callback(
                array.shape, current.sharding, lambda index: array[index]
            )
    # Not `jax.numpy.array`, which rejects a NaN under JAX's debugging flags.
    return jax.device_put(array, may_alias=False)
