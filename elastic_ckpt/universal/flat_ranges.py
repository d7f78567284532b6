"""Cuts a range of an array's elements in row-major order into boxes.

ZeRO saves ranges of flattened parameters, and a shard may begin in the middle of a
factored dim; both become boxes here. There are at most two for each dim but the first:
the rest of the first row, whole rows, the begin of the last row, and so on inwards.
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
    first, after = divmod(start, row)
    last, before = divmod(stop, row)
    if first == last:
        return [_in_row(first, box) for box in boxes_of_range(shape[1:], after, before)]
    boxes = []
    if after:
        rest = boxes_of_range(shape[1:], after, row)
        boxes += [_in_row(first, box) for box in rest]
        first += 1
    if first < last:
        whole = (0,) * (len(shape) - 1)
        boxes.append(Box(start=(first, *whole), stop=(last, *shape[1:])))
    if before:
        begin = boxes_of_range(shape[1:], 0, before)
        boxes += [_in_row(last, box) for box in begin]
    return boxes


def _in_row(row: int, box: Box) -> Box:
    return Box(start=(row, *box.start), stop=(row + 1, *box.stop))
