"""What a layout makes of a checkpoint: moves, and the tensors derived for them.

A move is a strided copy from one tensor to one target. Its dims are factored: a dim of
a tensor is a product of one or several of them. In `(kv q d) embed -> embed kv (q d)`
the factored dims are kv, q, d and embed; kv advances by q * d along dim 0 of the
source, and by 1 along dim 1 of the target.

What is no copy is a derived tensor: replicas that are compared, ranks that are
averaged, a quantized weight and its scales. Moves copy it like a stored one. Numbers of
tensors count the stored ones first, then the derived ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

_FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")


def is_half_a_byte(dtype: np.dtype | None) -> bool:
    """Whether a byte has two elements of a dtype, the first in its low half."""
    return dtype is not None and dtype.name in _FOUR_BITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The place of the factored dims of a move in one of its tensors.

    Attributes:
      start: the index of the first element, by dim of the tensor.
      dims: the dim of the tensor that each factored dim advances along; -1 if the
        tensor does not vary along it.
      steps: by how many elements it advances along that dim.
    """

    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Elements of a tensor, and the elements of a target that they become.

    Attributes:
      target: the name of the target tensor, `params/decoder/norm/scale`.
      sizes: lengths of the factored dims.
      target_side: where they lie in the target tensor.
      source: the number of the tensor that is read.
      source_side: where they lie in it.
      scale: factor of the values, in float32 at least.
      shift: added after scaling.
    """

    target: str
    sizes: tuple[int, ...]
    target_side: Side
    source: int
    source_side: Side
    scale: float = 1.0
    shift: float = 0.0


class Operand(NamedTuple):
    """A tensor that a derived one is computed from.

    Attributes:
      tensor: its number; that of a stored tensor.
      dims: for each of its dims, the dim of the derived tensor that it runs along; -1
        for the dim over which the two factors of `plus` are multiplied. It is constant
        along dims that do not occur.
      blocks: for each of its dims, how many indices of the derived tensor share one of
        its own: index = index of the derived tensor // block.
      viewed_as: the dtype that its bytes are read as; None for its own. Where that has
        half the bits, the last dim has twice the elements.
    """

    tensor: int
    dims: tuple[int, ...]
    blocks: tuple[int, ...]
    viewed_as: np.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor computed from stored ones, element by element.

    Attributes:
      how: `equal`: the first operand, compared with the others bit by bit; `mean` and
        `sum` of all; `times`: the product of all; `plus`: the first, plus `factor`
        times the matrix product of the second and the third.
      operands: the first has the dims of the derived tensor, in its order.
      shape: in elements.
      dtype: of the result: that of the first operand for `equal`, else float32 or a
        wider one, so that values are rounded once, by the move.
      factor: of the product, of `times` and `plus`.
    """

    how: Literal["equal", "mean", "sum", "times", "plus"]
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A tensor that is filled by moves.

    Attributes:
      name: its path in the target, joined by "/".
      dtype: that values are cast to.
      shape: in elements.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A box of a target tensor that no source has, such as padding of a vocabulary.

    Attributes:
      target: the name of the target tensor.
      start: the index of its first element, by dim.
      stop: the index after its last, by dim.
      value: of all its elements.
    """

    target: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A layout, matched with a checkpoint.

    Attributes:
      moves: from stored and derived tensors to target tensors.
      derived: the derived tensors; their numbers follow those of the stored ones.
      fills: the elements of targets that are padding.
      targets: the target tensors, as given or derived.
      rules: each rule, for people, and the number of the first move after its moves; a
        rule occurs once for each of its states.
    """

    moves: Sequence[Move]
    derived: Sequence[Derived]
    fills: Sequence[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]
