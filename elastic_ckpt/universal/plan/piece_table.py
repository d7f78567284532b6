"""Tables of pieces: strided copies from a fragment into a buffer of this host.

A buffer is a box of a target tensor that this host needs. Sources that are reduced fill
separate buffers, the layers of a region of a bounded size; a region is complete
when its layers are, and its result is then a piece of the target's box.

Glossary: n pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import Move, TargetTensor
from elastic_ckpt.universal.plan.cover import Placed
from elastic_ckpt.universal.plan.strided_runs import Form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory that is filled by copies.

    Attributes:
      tensor: the target tensor.
      box: of it that the buffer holds; for a layer of a region, of its factored dims.
      dtype: of its elements.
      order: buffers of a lower number are filled first.
    """

    tensor: TargetTensor
    box: Box
    dtype: np.dtype
    order: int

    def __str__(self) -> str:
        return f"{self.tensor.name}{self.box}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Elements of a target that several sources are reduced to.

    Attributes:
      layers: the numbers of the buffers of its sources.
      moves: of its sources, in the same order.
      box: of the factored dims of these moves.
      buffer: the number of the buffer that gets the result.
      element: the place of the first element there.
      form: of the copy of the result to that buffer.
    """

    layers: tuple[int, ...]
    moves: tuple[Move, ...]
    box: Box
    buffer: int
    element: int
    form: Form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilledPart:
    """Elements of a buffer that no source has.

    Attributes:
      buffer: its number.
      place: the elements in the buffer.
      value: of all of them.
    """

    buffer: int
    place: tuple[slice, ...]
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """All pieces of a host.

    Attributes:
      buffers: those that are filled.
      regions: of the sources that are reduced.
      fills: of those.
      files: the names of the files.
      forms: those of the copies.
      tensor: the stored tensor that a piece is read from, int64 `[n]`.
      file: the number of its file, int64 `[n]`.
      source: its first byte there, int64 `[n]`.
      form: the number of its form, int64 `[n]`.
      buffer: the number of its buffer, int64 `[n]`.
      element: the place of its first element there, int64 `[n]`.
      placed: what fills each buffer, for the proof.
    """

    buffers: Sequence[Buffer]
    regions: Sequence[Region]
    fills: Sequence[FilledPart]
    files: Sequence[str]
    forms: Sequence[Form]
    tensor: np.ndarray
    file: np.ndarray
    source: np.ndarray
    form: np.ndarray
    buffer: np.ndarray
    element: np.ndarray
    placed: Placed
