"""A layout matched with a checkpoint: moves, and the tensors derived for them.

A move is a strided copy from one tensor to one target. Its dims are factored: each dim
of a tensor is a product of one or more of them. In `(kv q d) embed -> embed kv (q d)`
the factored dims are kv, q, d and embed; kv advances by q * d along dim 0 of the
source, and by 1 along dim 1 of the target.

Anything but a copy is a derived tensor: compared replicas, a mean over ranks, a
quantized weight times its scales. Moves copy from it as from a stored tensor. Tensor
numbers count the stored tensors first, then the derived ones.
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
      dims: the dim of the tensor that each factored dim advances along; -1 if the
        tensor does not vary along it.
      steps: how many elements each factored dim advances along that dim.
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
      target_side: where they lie in the target tensor.
      source: the number of the source tensor.
      source_side: where they lie in the source tensor.
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
      tensor: its number.
      dims: for each of its dims, the dim of the derived tensor that it runs along; -1
        for the dim that `plus` contracts. It is constant along all other dims.
      blocks: for each of its dims, how many indices of the derived tensor share one of
        its own: index = index of the derived tensor // block.
      viewed_as: the dtype to read its bytes as; None for its own. A dtype of four bits
        doubles the last dim.
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
      operands: the first has all dims of the derived tensor, in its order.
      dtype: that of the first operand for `equal`, int64 for sums of integers,
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
      name: its path in the target, joined by "/".
      dtype: the dtype to which values are cast.
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
    """A box of a target tensor with one value and no source, such as padding.

    It reaches from the index `start` to before `stop`, in each dim.
    """

    target: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A layout matched with a checkpoint.

    Attributes:
      moves: from stored and derived tensors to target tensors.
      derived: the derived tensors; their numbers follow those of the stored ones.
      fills: the padding of targets.
      targets: the target tensors by name, as given or as the rules make them.
      rules: the text of each rule, and where its moves end in `moves`; a rule occurs
        once for each of its states.
    """

    moves: Sequence[Move]
    derived: Sequence[Derived]
    fills: Sequence[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]
