"""A move: elements of stored tensors, and the elements of a target that they become.

A layout matched with a checkpoint is a list of moves. Each is a strided copy whose dims
are factored: a dim of a tensor is a product of one or several of them. In
`(kv q d) embed -> embed kv (q d)` the factored dims are kv, q, d and embed; kv advances
by q * d along dim 0 of the source, and by 1 along dim 1 of the target. A move of
several sources reduces them: replicas that are compared, ranks that are averaged, a
quantized weight and its scales.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np

_FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")


def is_half_a_byte(dtype: np.dtype | None) -> bool:
    """Whether a byte has two elements of a dtype, the first in its low half."""
    return dtype is not None and dtype.name in _FOUR_BITS


class Reduction(enum.Enum):
    """The treatment of several sources of the same target elements."""

    NONE = "none"
    # All are read, and have to be bit-equal.
    EQUAL = "equal"
    MEAN = "mean"
    SUM = "sum"
    # The first times the others, which may be the same along some dims.
    PRODUCT = "product"
    # The first plus the product of the second and the third, which are matrices.
    LOW_RANK = "low_rank"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The place of the factored dims of a move in one of its tensors.

    Attributes:
      start: the index of the first element, by dim of the tensor.
      dims: the dim of the tensor that each factored dim advances along; -1 if it does
        not occur there: the tensor is the same along it.
      steps: by how many elements it advances along that dim.
    """

    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The arithmetic on values, in this order; in float32 at least.

    Attributes:
      reduction: of the sources.
      factor: of a product, or of the product of matrices.
      scale: factor of what the sources are reduced to.
      shift: added after scaling.
    """

    reduction: Reduction = Reduction.NONE
    factor: float = 1.0
    scale: float = 1.0
    shift: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor that a move reads.

    Attributes:
      tensor: its number in the checkpoint's `tensors`.
      side: where the factored dims lie in it.
      viewed_as: the dtype that its bytes are read as; None for its own. Where it has
        half the bits, the last dim of the tensor has twice the elements.
    """

    tensor: int
    side: Side
    viewed_as: np.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Elements of stored tensors, and the elements of a target that they become.

    Attributes:
      target: the name of the target tensor, `params/decoder/norm/scale`.
      sizes: lengths of the factored dims.
      target_side: where they lie in the target tensor; the dims over which matrices are
        multiplied do not occur there.
      sources: one, or several that `arithmetic` reduces.
      arithmetic: None if values are copied, cast at most.
    """

    target: str
    sizes: tuple[int, ...]
    target_side: Side
    sources: tuple[Source, ...]
    arithmetic: Arithmetic | None = None

    @property
    def source(self) -> int:
        """The number of its first stored tensor."""
        return self.sources[0].tensor

    @property
    def source_side(self) -> Side:
        """Where the factored dims lie in its first stored tensor."""
        return self.sources[0].side


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
      moves: from stored tensors to target tensors.
      fills: the elements of targets that are padding.
      targets: the target tensors, as given or derived.
      rules: each rule, for people, and the number of the first move after its moves; a
        rule occurs once for each of its states.
    """

    moves: list[Move]
    fills: list[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]
