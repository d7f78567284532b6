"""Parameters of which ranks hold ranges, in flat tensors of many parameters (ZeRO)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal import flat_ranges
from elastic_ckpt.universal.formats import coverage
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import Fragment
from elastic_ckpt.universal.strides import row_major

# A fragment and its box, without their dims; each of the dims.
_PIECE_BYTES = 300
_DIM_BYTES = 80


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements of a flat tensor.

    Attributes:
      file: that holds the flat tensor.
      flat: the tensor.
      start: the first element in it.
      numel: the number of elements.
    """

    file: TorchFile
    flat: Tensor
    start: int
    numel: int


def fragments(
    shape: tuple[int, ...], ranges: Sequence[Range], place: str
) -> tuple[Fragment, ...]:
    """The boxes of a parameter that ranges hold, which follow one another.

    Args:
      shape: of the parameter.
      ranges: in the order of its elements; of one dtype.
      place: the checkpoint and the parameter, for messages.

    Raises:
      FormatError: if a range lies outside of its flat tensor, they are more or fewer
        elements than the parameter has, or boxes take too much memory.
    """
    coverage.checked_shape(shape, place)
    total = math.prod(shape)
    held = sum(each.numel for each in ranges)
    for each in ranges:
        _check(each, ranges[0], place)
    if held != total:
        raise ranges[0].file.error(
            f"and its neighbors hold {held} elements of {place}, which has {total};"
            " files of ranks are missing, or of another save"
        )
    pieces: list[Fragment] = []
    at = 0
    for each in ranges:
        made = _pieces(shape, at, each)
        # Up to twice as many as there are dims.
        each.file.take(len(made) * (_PIECE_BYTES + _DIM_BYTES * len(shape)))
        pieces += made
        at += each.numel
    return tuple(pieces)


def _check(part: Range, first: Range, place: str) -> None:
    flat, file = part.flat, part.file
    width = flat.dtype.itemsize
    if len(flat.shape) != 1 or (flat.shape[0] > 1 and flat.byte_strides != (width,)):
        raise file.error(f"holds {place} in a tensor of shape {flat.shape}")
    if flat.dtype != first.flat.dtype:
        raise file.error(
            f"holds {place} as {flat.dtype}, and {first.file.path} as"
            f" {first.flat.dtype}"
        )
    if not 0 <= part.start <= part.start + part.numel <= flat.shape[0]:
        raise file.error(
            f"holds {place} in elements {part.start} to {part.start + part.numel} of a"
            f" tensor of {flat.shape[0]}"
        )


def _pieces(shape: tuple[int, ...], at: int, part: Range) -> list[Fragment]:
    # The boxes of elements `at` and following.
    width = part.flat.dtype.itemsize
    strides = row_major(shape, width)
    offset = part.flat.file_offset + part.start * width
    pieces = []
    for box, first in _boxes(shape, at, at + part.numel):
        pieces.append(
            Fragment(
                box=box,
                file=part.file.path,
                offset=offset + first * width,
                strides=strides,
            )
        )
    return pieces


# The states of a parameter have equal ranges, whose boxes they share.
@functools.lru_cache(maxsize=2**14)
def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Box, int]]:
    # With the number of the first element of each, from `start`.
    boxes = flat_ranges.boxes_of_range(shape, start, stop)
    firsts = itertools.accumulate((box.volume for box in boxes), initial=0)
    return list(zip(boxes, firsts, strict=False))
