"""A layout matched with a checkpoint: its moves and the tensors derived for them.

A move is a strided copy from one tensor to one target. Its dims are factored: each dim
of a tensor is a product of one or more factored dims. In
`(kv q d) embed -> embed kv (q d)`, the factored dims are kv, q, d and embed; kv
advances by q * d along dim 0 of the source and by 1 along dim 1 of the target.

Anything but a copy is a derived tensor: compared replicas, a mean over ranks, or a
quantized weight times its scales. Moves copy from stored and derived tensors alike.
Both share one index, in which stored tensors come first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

_FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")


def is_half_a_byte(dtype: np.dtype | None) -> bool:
    """Whether a byte stores two elements of `dtype`, the first in its low half."""
    return dtype is not None and dtype.name in _FOUR_BITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The position of a move's factored dims in one of its tensors.

    Attributes:
      start: the index of the first element.
      dims: for each factored dim, the tensor's dim along which it advances; -1 if the
        tensor does not vary along it.
      steps: for each factored dim, the number of elements by which it advances along
        that dim.
    """

    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A strided copy from a tensor into a target.

    Attributes:
      target: the name of the target tensor, such as `params/decoder/norm/scale`.
      sizes: the lengths of the factored dims.
      target_side: the position of the factored dims in the target tensor.
      source: the index of the source tensor.
      source_side: the position of the factored dims in the source tensor.
      scale: the factor that multiplies the values, in at least float32.
      shift: the number added after scaling.
    """

    target: str
    sizes: tuple[int, ...]
    target_side: Side
    source: int
    source_side: Side
    scale: float = 1.0
    shift: float = 0.0


class Operand(NamedTuple):
    """A stored tensor that a derived one is computed from.

    Attributes:
      tensor: the stored tensor's index.
      dims: for each stored dim, the corresponding dim of the derived tensor; -1 for the
        dim that `plus` contracts. The operand is constant along all other derived dims.
      blocks: for each stored dim, the number of derived indices that share one stored
        index: stored index = derived index // block.
      viewed_as: the dtype to read the bytes as; None for the stored dtype. A four-bit
        dtype doubles the last dim.
    """

    tensor: int
    dims: tuple[int, ...]
    blocks: tuple[int, ...]
    viewed_as: np.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor computed from stored ones, element by element.

    Attributes:
      how: the operation. `equal` is the first operand, compared with the others bit by
        bit; `mean`, `sum` and `times` are the mean, sum and product of all operands;
        `plus` is the first operand plus `factor` times the matrix product of the second
        and third.
      operands: the stored tensors. The first has all dims of the derived tensor, in the
        same order.
      dtype: the first operand's dtype for `equal`, int64 for sums of integers,
        otherwise float32 or wider, so that only the move rounds.
      factor: the factor that multiplies the product of `times` or `plus`.
    """

    how: Literal["equal", "mean", "sum", "times", "plus"]
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A tensor that moves fill.

    Attributes:
      name: the path in the target, joined by "/".
      dtype: the dtype that values are cast to.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A box of a target tensor that is filled with a constant, such as padding.

    In each dim, the box begins at index `start` and stops before `stop`.
    """

    target: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A layout matched with a checkpoint.

    Attributes:
      moves: copies from stored and derived tensors to target tensors.
      derived: the derived tensors, which are indexed after the stored ones.
      fills: constants for target elements without a source.
      targets: the target tensors by name, either passed in or made by the rules.
      rules: pairs of a rule's text and the end of its moves in `moves`; a rule has one
        pair for each of its states.
    """

    moves: Sequence[Move]
    derived: Sequence[Derived]
    fills: Sequence[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]
