"""Cuts boxes of a move's factored dims at the bounds of boxes in its tensors.

If a tensor's dim is the product of several factored dims, its indices number the
elements of those dims in row-major order, so an interval of indices is a contiguous
range of elements. A range consists of one box of whole rows and, for each dim except
the first, at most two more boxes: the rest of the first row and the start of the last
row. ZeRO also saves flattened parameters as such ranges.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import Side


@functools.lru_cache(maxsize=2**16)
def row_major(shape: tuple[int, ...], itemsize: int = 1) -> tuple[int, ...]:
    """The strides of an array in row-major order, as multiples of `itemsize`."""
    sizes = [*shape[1:], itemsize][::-1] if shape else []
    return tuple(itertools.accumulate(sizes, lambda a, b: a * b))[::-1]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that contain elements `start` to `stop` in row-major order.

    Returns:
      Disjoint boxes, in element order; an empty list if the range is empty.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"elements {start} to {stop} are out of range for shape {shape}"
        )
    if start == stop:
        return []
    if not shape:
        return [Box(start=(), stop=())]
    row = math.prod(shape[1:])
    # Whole rows lie between the rest of the first row and the start of the last row.
    head = min(-(-start // row) * row, stop)
    tail = max(stop // row * row, head)
    boxes = _in_row(shape, start, head)
    if head < tail:
        first, last = (head // row, tail // row)
        whole = (0,) * (len(shape) - 1)
        boxes.append(Box(start=(first, *whole), stop=(last, *shape[1:])))
    return boxes + _in_row(shape, tail, stop)


def _in_row(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    row = math.prod(shape[1:])
    at, first = divmod(start, row)
    return [
        Box(start=(at, *box.start), stop=(at + 1, *box.stop))
        for box in boxes_of_range(shape[1:], first, first + stop - start)
    ]


def inside(part: Box, side: Side, box: Box) -> list[Box]:
    """Finds the elements of a move's part that lie in a box of one of its tensors.

    `part` is a nonempty box of the factored dims; `box` is a box of the tensor.

    Returns:
      Disjoint boxes of the factored dims; only `part` itself if all of it is in `box`.

    Raises:
      ValueError: if the indices along a dim do not ascend in row-major order.
    """
    cuts = []
    lows, highs = _reach(part, side.dims, side.steps, len(side.start))
    ends = zip(side.start, lows, highs, box.start, box.stop, strict=True)
    for dim, (at, low, high, start, stop) in enumerate(ends):
        if at + low >= stop or at + high <= start:
            return []
        if at + low < start or at + high > stop:
            cuts.append((dim, start - at - low, stop - at - low))
    return _inside(part, side.dims, side.steps, tuple(cuts)) if cuts else [part]


def bounds(part: Box, side: Side) -> Box:
    """The smallest box of a tensor that contains a move's part."""
    lows, highs = _reach(part, side.dims, side.steps, len(side.start))
    return Box(
        start=tuple(map(operator.add, side.start, lows)),
        stop=tuple(map(operator.add, side.start, highs)),
    )


def place(element: Sequence[int], side: Side, box: Box, strides: Sequence[int]) -> int:
    """The offset in a box of a tensor of one element of the factored dims.

    The offset is in the same units as `strides`, the box's strides.
    """
    at = sum(map(operator.mul, map(operator.sub, side.start, box.start), strides))
    return at + sum(map(operator.mul, element, advances(side, strides)))


def advances(side: Side, strides: Sequence[int]) -> tuple[int, ...]:
    """Computes the strides of the factored dims from a tensor's strides."""
    factors = zip(side.dims, side.steps, strict=True)
    return tuple(step * strides[dim] if dim >= 0 else 0 for dim, step in factors)


# The moves of stacked layers differ only in position, so their cuts are the same.
@functools.lru_cache(maxsize=2**12)
def _reach(
    part: Box, dims: tuple[int, ...], steps: tuple[int, ...], rank: int
) -> tuple[list[int], list[int]]:
    # For each dim, the lowest index and one past the highest, relative to the side's
    # start.
    lows, highs = [0] * rank, [1] * rank
    for dim, step, start, stop in zip(dims, steps, part.start, part.stop, strict=True):
        if dim >= 0:
            lows[dim] += step * start
            highs[dim] += step * (stop - 1)
    return lows, highs


@functools.lru_cache(maxsize=2**12)
def _inside(
    part: Box,
    dims: tuple[int, ...],
    steps: tuple[int, ...],
    cuts: tuple[tuple[int, int, int], ...],
) -> list[Box]:
    # Each cut is a dim of the tensor and an interval of indices along that dim,
    # relative to the part's lowest index.
    choices = []
    for dim, first, after in cuts:
        factors = [
            factor
            for factor, of_dim in enumerate(dims)
            if of_dim == dim and part.stop[factor] - part.start[factor] > 1
        ]
        factors.sort(key=lambda factor: -steps[factor])
        sizes = [part.stop[factor] - part.start[factor] for factor in factors]
        of_factors = [steps[factor] for factor in factors]
        ranges = _in_interval(sizes, of_factors, first, after)
        choices.append([(factors, each) for each in ranges])
    return [_cut(part, chosen) for chosen in itertools.product(*choices)]


def _in_interval(
    sizes: Sequence[int], steps: Sequence[int], start: int, stop: int
) -> list[Box]:
    below = 0
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step <= below:
            raise ValueError(
                f"factored dims with sizes {sizes} and steps {steps} are not in"
                " row-major order"
            )
        below += step * (size - 1)
    first, after = _num_below(start, sizes, steps), _num_below(stop, sizes, steps)
    return boxes_of_range(sizes, first, after)


def _num_below(index: int, sizes: Sequence[int], steps: Sequence[int]) -> int:
    # Counts the elements whose index is less than `index`.
    number, inner = 0, math.prod(sizes)
    for size, step in zip(sizes, steps, strict=True):
        if index <= 0:
            return number
        inner //= size
        rows = (index - 1) // step
        if rows >= size:
            return number + size * inner
        number += rows * inner
        index -= rows * step
    return number + (index > 0)


def _cut(part: Box, chosen: Sequence[tuple[list[int], Box]]) -> Box:
    start, stop = list(part.start), list(part.stop)
    for factors, cut in chosen:
        for factor, first, after in zip(factors, cut.start, cut.stop, strict=True):
            start[factor] = part.start[factor] + first
            stop[factor] = part.start[factor] + after
    return Box(start=tuple(start), stop=tuple(stop))
