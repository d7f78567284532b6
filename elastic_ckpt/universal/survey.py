"""What a checkpoint has, by patterns of names; and the tree that a layout leads to.

Tensors whose names differ in numbers alone, and which have one shape and dtype, are a
*family*.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.relation import DTYPES

_NUMBER = re.compile(r"(?<![0-9A-Za-z])(?:0|[1-9][0-9]{0,17})(?![0-9A-Za-z])")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tensors whose names differ in numbers alone.

    Attributes:
      parts: of their names, between the numbers.
      numbers: the values that occur, by place in the name.
      names: all names.
      shape: of each.
      dtype: of each.
      kind: of each, see `StoredTensor`.
    """

    parts: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str = "parameter"

    @property
    def num_bytes(self) -> int:
        """The bytes of all values."""
        return len(self.names) * math.prod(self.shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        """The names, as `layers.{0-31}.weight`; without control characters."""
        pairs = zip(self.numbers, self.parts[1:], strict=True)
        text = self.parts[0] + "".join(
            f"{{{_ranges(numbers)}}}{part}" for numbers, part in pairs
        )
        return text if text.isprintable() else ascii(text)


def families(tensors: Sequence[StoredTensor]) -> list[Family]:
    """The families of tensors, in the order of their first ones."""
    groups: dict[object, list[str]] = {}
    unboxed = name_pattern.unboxed(tensor.name for tensor in tensors)
    for tensor in tensors:
        name = unboxed.get(tensor.name, tensor.name)
        key = (
            tuple(_NUMBER.split(name)),
            tensor.shape,
            tensor.dtype,
            tensor.kind,
        )
        groups.setdefault(key, []).append(name)
    found = []
    for (parts, shape, dtype, kind), names in groups.items():  # type: ignore[misc]
        columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
        kept, numbers = [parts[0]], []
        for column, part in zip(columns, parts[1:], strict=False):
            if len(set(column)) == 1:
                # The only number is a part of the name.
                kept[-1] += column[0] + part
            else:
                kept.append(part)
                numbers.append(tuple(sorted(set(map(int, column)))))
        found.append(
            Family(
                parts=tuple(kept),
                numbers=tuple(numbers),
                names=tuple(dict.fromkeys(names)),
                shape=shape,
                dtype=dtype,
                kind=kind,
            )
        )
    return found


def tree(path: str) -> dict[str, TargetTensor]:
    """The tensors of a tree that a layout leads to.

    Args:
      path: of a checkpoint of any format that is read, or of a JSON file of shapes by
        name, `{"embed/kernel": [8, 4]}`, which have float32, or `{"shape": [8, 4],
        "dtype": "bfloat16"}`.

    Raises:
      LayoutError: if the JSON file is missing, or has something else.
      FormatError: as `open_checkpoint`.
    """
    if not path.endswith(".json"):
        tensors = opening.open_checkpoint(path).tensors
        return {
            each.name: TargetTensor(name=each.name, dtype=each.dtype, shape=each.shape)
            for each in tensors
        }
    try:
        listed = json.loads(epath.Path(path).read_text())
        made = {}
        for name, given in listed.items():
            each = given if isinstance(given, dict) else {"shape": given}
            dtype, shape = each.get("dtype", "float32"), each["shape"]
            if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name!r} has {given!r}")
            made[name] = TargetTensor(
                name=name, dtype=np.dtype(dtype), shape=tuple(shape)
            )
        return made
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error}); check the path") from None
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RecursionError,
    ) as error:
        raise LayoutError(
            f'{path} is no JSON of shapes by name, such as {{"embed/kernel": [8, 4],'
            f' "head": {{"shape": [4], "dtype": "bfloat16"}}}}: {error}'
        ) from None


def _ranges(numbers: Sequence[int]) -> str:
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        listed = [number for _, number in run]
        runs.append(f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else str(listed[0]))
    return ",".join(runs)
