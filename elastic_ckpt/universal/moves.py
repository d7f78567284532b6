"""A layout matched with a checkpoint: moves, and the tensors derived for them.

A move is a strided copy from one tensor to one target. Its dims are factored: each dim
of a tensor is a product of one or more factored dims. In
`(kv q d) embed -> embed kv (q d)`, the factored dims are kv, q, d and embed; kv
advances by q * d along dim 0 of the source and by 1 along dim 1 of the target.

Anything but a copy is a derived tensor: compared replicas, a mean over ranks, a
quantized weight times its scales. Moves copy from derived tensors as from stored ones.
Stored tensors are numbered first, then derived ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

_FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")


def is_half_a_byte(dtype: np.dtype | None) -> bool:
    """Whether a byte holds two elements of `dtype`, the first in its low half."""
    return dtype is not None and dtype.name in _FOUR_BITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where a move's factored dims lie in one of its tensors.

    Attributes:
      start: the index of the first element.
      dims: the tensor's dim along which each factored dim advances; -1 if the tensor
        does not vary along the factored dim.
      steps: how many elements each factored dim advances along the tensor's dim.
    """

    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A strided copy from a tensor into a target.

    Attributes:
      target: the name of the target tensor, `params/decoder/norm/scale`.
      sizes: lengths of the factored dims.
      target_side: where the factored dims lie in the target tensor.
      source: the number of the source tensor.
      source_side: where the factored dims lie in the source tensor.
      scale: factor applied to the values, in at least float32.
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
    """A stored tensor that a derived one is computed from.

    Attributes:
      tensor: the stored tensor's number.
      dims: for each stored dim, the corresponding dim of the derived tensor; -1 for the
        dim that `plus` contracts. The operand is constant along all other derived dims.
      blocks: for each stored dim, how many indices of the derived tensor share one
        stored index: stored index = derived index // block.
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
      how: `equal`: the first operand, compared with the others bit by bit; `mean` and
        `sum` of all; `times`: the product of all; `plus`: the first, plus `factor`
        times the matrix product of the second and the third.
      operands: the stored tensors; the first has all dims of the derived tensor, in the
        same order.
      dtype: the first operand's dtype for `equal`, int64 for sums of integers,
        otherwise float32 or wider: only the move rounds.
      factor: multiplies the product of `times` or `plus`.
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
      dtype: the dtype to which values are cast.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A box of a target tensor with one value and no source, such as padding.

    In each dim, it begins at index `start` and stops before `stop`.
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
      derived: the derived tensors, numbered after the stored ones.
      fills: the padding of targets.
      targets: the target tensors by name, as passed or as the rules make them.
      rules: the text of each rule, and where its moves end in `moves`; a rule occurs
        once for each of its states.
    """

    moves: Sequence[Move]
    derived: Sequence[Derived]
    fills: Sequence[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]
