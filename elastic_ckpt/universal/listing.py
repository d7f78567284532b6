"""Lists a checkpoint's tensors by family and reads a layout's target tree."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import codec
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import names
from elastic_ckpt.universal.rules.layout import LayoutError

_NUMBER = re.compile(r"(?<![0-9A-Za-z])(?:0|[1-9][0-9]{0,17})(?![0-9A-Za-z])")


class Family(NamedTuple):
    """Tensors of the same shape, dtype and kind whose names differ only in numbers.

    Attributes:
      names: one printable string that stands for all names: `layers.{0-31}.weight`.
      tensors: the number of tensors.
      num_bytes: the total size of the values.
    """

    names: str
    tensors: int
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    num_bytes: int


def families(tensors: Sequence[StoredTensor]) -> list[Family]:
    """Groups tensors into families, ordered by each family's first tensor."""
    # The numbers in the names, by the properties that a family shares.
    groups: dict[tuple, set[tuple[int, ...]]] = {}
    unboxed = names.unboxed({tensor.name for tensor in tensors})
    for tensor in tensors:
        name = unboxed.get(tensor.name, tensor.name)
        key = (*_NUMBER.split(name),), tensor.shape, tensor.dtype, tensor.kind
        numbers = tuple(map(int, _NUMBER.findall(name)))
        groups.setdefault(key, set()).add(numbers)
    return [
        Family(
            names=_names(parts, numbers),
            tensors=len(numbers),
            shape=shape,
            dtype=dtype,
            kind=kind,
            num_bytes=len(numbers) * math.prod(shape) * dtype.itemsize,
        )
        for (parts, shape, dtype, kind), numbers in groups.items()
    ]


def _names(parts: Sequence[str], numbers: Collection[tuple[int, ...]]) -> str:
    text = parts[0]
    for column, part in zip(zip(*numbers, strict=True), parts[1:], strict=True):
        listed = sorted(set(column))
        text += f"{{{_ranges(listed)}}}" if len(listed) > 1 else str(listed[0])
        text += part
    return text if text.isprintable() else ascii(text)


def _ranges(numbers: Sequence[int]) -> str:
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        listed = [number for _, number in run]
        runs.append(f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else str(listed[0]))
    return ",".join(runs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str = "float32"


def tree(path: str) -> dict[str, TargetTensor]:
    """Reads the tensors of a layout's target tree.

    Args:
      path: a checkpoint in any supported format, or a JSON file that maps names to
        shapes: `{"embed/kernel": [8, 4]}`. Instead of a shape, which means float32, a
        value can be `{"shape": [8, 4], "dtype": "bfloat16"}`.

    Raises:
      LayoutError: if the JSON file is missing or malformed.
      FormatError: as `open_checkpoint`.
    """
    if not path.endswith(".json"):
        return {
            each.name: TargetTensor(name=each.name, dtype=each.dtype, shape=each.shape)
            for each in opening.open_checkpoint(path).tensors
        }
    try:
        given = json.loads(epath.Path(path).read_text())
        listed = codec.decode(dict[str, tuple[int, ...] | _Tensor], given, name="it")
        tensors = {
            name: each if isinstance(each, _Tensor) else _Tensor(shape=each)
            for name, each in listed.items()
        }
        return {
            name: TargetTensor(name=name, dtype=np.dtype(each.dtype), shape=each.shape)
            for name, each in tensors.items()
        }
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error}); check the path") from None
    except (ValueError, TypeError) as error:
        raise LayoutError(
            f"{path} is not a JSON object that maps names to shapes, such as"
            ' {"embed/kernel": [8, 4], "head": {"shape": [4], "dtype": "bfloat16"}}:'
            f" {error}"
        ) from None
