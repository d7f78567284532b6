"""Example ids as runs: `[5, [100, 4, 2]]` is 5, 100, 102, 104, 106.

A run is a start, a count and a stride. Ids of data in the order of its files are few
runs; ids of shuffled data are as many numbers as there are rows.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence

import numpy as np

# The most JSON text of the ids of a step; if it is longer, they are not listed.
MAX_BYTES = 1600
# A shorter run takes no less space than its ids.
_LEAST_COUNT = 4

Items = Sequence[int | list[int]]


def encode(ids: np.ndarray) -> Items | None:
    """The ids, uint64 `[rows]`, in row order; None if they take over `MAX_BYTES`."""
    strides = np.diff(ids.view(np.int64))
    # The last id of each stretch with one stride. A stretch may yield no item, but then
    # the next one does, and an item takes two bytes or more.
    ends = np.flatnonzero(strides[1:] != strides[:-1]) + 1
    if len(ends) > MAX_BYTES:
        return None
    items: list[int | list[int]] = []
    position = 0
    numbers = ids.tolist()
    for end in [*ends.tolist(), len(numbers) - 1]:
        length = end - position + 1
        if length < _LEAST_COUNT:
            items += numbers[position:end]
            position = max(position, end)
        else:
            items.append([numbers[position], length, int(strides[position])])
            position = end + 1
    items += numbers[position:]
    return items if len(json.dumps(items, separators=(",", ":"))) <= MAX_BYTES else None


def count(items: Items) -> int:
    """The number of ids.

    Raises:
      TypeError, ValueError: if `items` are not ids and runs.
    """
    total = 0
    for item in items:
        if isinstance(item, int):
            total += 1
        else:
            _, num_ids, _ = map(operator.index, item)
            if num_ids < 1:
                raise ValueError(f"a run of {num_ids} ids")
            total += num_ids
    return total


def decode(items: Items) -> tuple[int, ...]:
    """The inverse of `encode`; also accepts a plain list of ids."""
    ids: list[int] = []
    for item in items:
        if isinstance(item, int):
            ids.append(item % 2**64)
        else:
            start, num_ids, stride = item
            ids += [(start + number * stride) % 2**64 for number in range(num_ids)]
    return tuple(ids)
