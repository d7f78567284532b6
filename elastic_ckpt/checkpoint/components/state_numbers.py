"""The numbers in an encoded state, by path, and the same state with others.

A number is one of Python, or an array or scalar with a single element. Its path joins
keys, indices and fields from the top of the state: `groups/0/lr`. It is `""` for a
state that is a number itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.checkpoint.components import encoding
from elastic_ckpt.checkpoint.components.encoding import Encoded

# Kinds of arrays: those of NumPy, and of ml_dtypes such as bfloat16.
KINDS = "iufbV"
_ARRAYS = ("numpy", "scalar", "array")


class Number(NamedTuple):
    """A number of a state.

    Attributes:
      path: where it is.
      dtype: of its array, or the class of a number of Python, such as `float`.
      value: as an array without dims.
    """

    path: str
    dtype: str
    value: np.ndarray


def numbers(encoded: Encoded) -> list[Number]:
    """The numbers of a state, in its order; several may have one path.

    A dict may have the keys `1` and `"1"`, or a key with a slash.
    """
    listed: list[Number] = []

    def listing(number: Number) -> np.ndarray:
        listed.append(number)
        return number.value

    _Walk(encoded, listing).state()
    return listed


def replaced(encoded: Encoded, values: Mapping[str, Any]) -> Encoded:
    """The state with other values of some numbers, of the same types.

    Args:
      encoded: the state, which stays as it is.
      values: by path; others stay.
    """
    return _Walk(encoded, lambda n: values.get(n.path, n.value)).state()


class _Walk:
    # Calls a function for each number, and makes the state of the values it returns.

    def __init__(self, encoded: Encoded, act: Callable[[Number], Any]) -> None:
        self._tree = encoded.tree
        self._arrays = list(encoded.arrays)
        self._act = act

    def state(self) -> Encoded:
        tree = self._node(self._tree, ())
        return Encoded(tree, self._arrays)

    def _node(self, node: Any, names: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [self._node(n, (*names, str(i))) for i, n in enumerate(node)]
        if isinstance(node, bool | int | float):
            return self._python(node, names)
        if not isinstance(node, dict):
            return node
        kind = next(iter(node))
        if kind == "float":
            (value,) = struct.unpack(">d", bytes.fromhex(node[kind]))
            return self._python(value, names)
        if kind == "tuple":
            return {kind: self._node(node[kind], names)}
        if kind in ("dict", "node"):
            field = "children" if kind == "node" else kind
            pairs = [
                [name, self._node(child, (*names, _simple(name, kind)))]
                for name, child in node[field]
            ]
            return {**node, field: pairs}
        if kind in _ARRAYS:
            self._array(node[kind], names)
        return node

    def _python(self, value: Any, names: tuple[str, ...]) -> Any:
        number = Number("/".join(names), type(value).__name__, np.array(value, object))
        after = self._act(number)
        after = after.item() if isinstance(after, np.ndarray) else after
        return encoding.encode(type(value)(after)).tree

    def _array(self, place: int, names: tuple[str, ...]) -> None:
        array = self._arrays[place]
        if array.size == 1 and array.dtype.kind in KINDS:
            number = Number("/".join(names), array.dtype.name, array.reshape(()))
            self._arrays[place] = np.full(array.shape, self._act(number), array.dtype)


def _simple(name: Any, kind: str) -> str:
    # Fields of nodes are named as JAX names them: `.count`, `['lr']`, `[0]`.
    return name.strip(".[]'") if kind == "node" else str(name)
