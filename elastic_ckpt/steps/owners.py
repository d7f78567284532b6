"""Decides which host does what with a box that several hosts hold.

It is a function of the box's holders alone, which the sharding names: no host has to
ask another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shares(holders: Sequence[tuple[int, ...]], num_bytes: np.ndarray) -> list[int]:
    """Which holder of each item uploads it.

    The items of one set of holders lie on a line of bytes, in their order. Holder k of
    n takes those whose middle lies in the k-th n-th of the line. So the shares of all
    holders are equal, up to the largest item, whatever the order of sizes.

    Args:
      holders: of each item. A host needs to give all items that it holds itself, and
        no others.
      num_bytes: of each item, int64 `[n]`.

    Returns:
      A holder of each item.
    """
    middles = np.zeros(len(holders))
    totals: dict[tuple[int, ...], int] = {}
    for number, of_item in enumerate(holders):
        begin = totals.get(of_item, 0)
        middles[number] = begin + num_bytes[number] / 2
        totals[of_item] = begin + int(num_bytes[number])
    return [
        of_item[min(int(middle / totals[of_item] * len(of_item)), len(of_item) - 1)]
        if totals[of_item]
        else of_item[0]
        for of_item, middle in zip(holders, middles.tolist(), strict=True)
    ]
