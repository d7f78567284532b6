"""A move: elements of a stored tensor, and the elements of a target that they become.

A layout matched with a checkpoint is a list of moves. Each is a strided copy whose dims
are factored: a dim of a tensor is a product of one or several of them. In
`(kv q d) embed -> embed kv (q d)` the factored dims are kv, q, d and embed; kv advances
by q * d along dim 0 of the source, and by 1 along dim 1 of the target.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np


class Reduction(enum.Enum):
    """The treatment of several sources of the same target elements."""

    NONE = "none"
    # All are read, and have to be bit-equal.
    EQUAL = "equal"
    MEAN = "mean"
    SUM = "sum"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The place of the factored dims of a move in one of its tensors.

    Attributes:
      start: the index of the first element, by dim of the tensor.
      dims: the dim of the tensor that each factored dim advances along; -1 if it does
        not occur there, and has length 1.
      steps: by how many elements it advances along that dim.
    """

    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The arithmetic on values, in this order; in float32 at least.

    Attributes:
      reduction: over sources of the same elements.
      scale: factor.
      shift: added after scaling.
    """

    reduction: Reduction = Reduction.NONE
    scale: float = 1.0
    shift: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A strided copy of elements of a stored tensor into a target tensor.

    Attributes:
      source: the number of the stored tensor in the checkpoint's `tensors`.
      target: the name of the target tensor, `params/decoder/norm/scale`.
      sizes: lengths of the factored dims.
      source_side: where they lie in the stored tensor.
      target_side: where they lie in the target tensor.
      arithmetic: None if values are copied, cast at most.
    """

    source: int
    target: str
    sizes: tuple[int, ...]
    source_side: Side
    target_side: Side
    arithmetic: Arithmetic | None = None


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
