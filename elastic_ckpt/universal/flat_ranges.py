"""Cuts a range of an array's elements in row-major order into boxes.

ZeRO saves ranges of flattened parameters, and a shard may begin in the middle of a
factored dim; both become boxes here. There are at most two for each dim but the first:
the rest of the first row, whole rows, the start of the last row, and so on inwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_ckpt.core.boxes import Box


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of elements `start` to `stop`, in row-major order.

    Args:
      shape: of the array.
      start: the number of the first element.
      stop: the number after the last, at most the volume of the array.

    Returns:
      Disjoint boxes, in the order of their elements; none if the range is empty.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not inside shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box(start=(), stop=())]
    row = math.prod(shape[1:])
    # Whole rows lie between the rest of the first and the start of the last.
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
