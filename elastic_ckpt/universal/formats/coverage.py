"""Fragments of tensors, and whether they cover a tensor without gaps or overlaps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from elastic_ckpt.core import box_cover, box_join, boxes
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.stored import Fragment
from elastic_ckpt.universal.strides import row_major

# NumPy's limit.
MOST_DIMS = 64
MOST_ELEMENTS = 1 << 48


@functools.lru_cache(maxsize=2**16)
def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return boxes.whole(shape)


def contiguous(
    box: Box, itemsize: int, *, file: str, offset: int
) -> tuple[Fragment, ...]:
    """The fragment of a box that lies in a file in row-major order; none if empty."""
    shape = box.shape
    if 0 in shape:
        return ()
    strides = row_major(shape, itemsize)
    return (Fragment(box=box, file=file, offset=offset, strides=strides),)


def checked_shape(shape: Iterable[object], place: str) -> tuple[int, ...]:
    """`shape` as a tuple of numbers.

    Args:
      shape: as a file has it.
      place: the file and the tensor, for messages.

    Raises:
      FormatError: if it is no shape, or one of a tensor that is too large.
    """
    dims = tuple(shape)
    numbers = [dim for dim in dims if type(dim) is int and dim >= 0]
    if len(numbers) != len(dims) or len(dims) > MOST_DIMS:
        # Parts that are no numbers may be nested.
        shown = [dim if type(dim) is int else type(dim).__name__ for dim in dims[:9]]
        raise FormatError(f"{place} has the shape {shown}, which is none")
    if math.prod(filter(None, numbers)) > MOST_ELEMENTS:
        raise FormatError(f"{place} has the shape {list(dims)}, which is too large")
    return tuple(numbers)


def check(shape: tuple[int, ...], parts: Sequence[Box], place: str) -> None:
    """Fails unless `parts` cover an array of `shape`, each element once.

    Args:
      shape: of the array.
      parts: boxes of as many dims.
      place: the file and the tensor, for messages.

    Raises:
      FormatError: if a box lies outside, two overlap, or there is a gap.
    """
    array = whole(shape)
    if len(parts) == 1 and parts[0] == array:
        return
    for part in parts:
        if not boxes.contains(array, part):
            raise FormatError(f"{place} has the part {part} outside of {array}")
    held = Boxes.from_boxes([part for part in parts if part.volume], rank=len(shape))
    gaps = box_cover.gaps(array, held)
    if len(gaps):
        raise FormatError(f"{place} lacks the part {gaps[0]} of {array}")
    if int(held.volumes.sum()) != array.volume:
        raise FormatError(f"{place} has parts that overlap{_overlap(held)}")


def _overlap(held: Boxes) -> str:
    # Comparing every pair of many equal boxes would take long.
    if len(held) > 1000:
        return ""
    first, second = box_join.overlaps(held, held)
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a < b]
    return f", {held[int(pairs[0][0])]} and {held[int(pairs[0][1])]}"
