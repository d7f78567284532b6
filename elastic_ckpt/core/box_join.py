"""Finds all pairs of overlapping boxes from two sets: the first part of a read plan.

A spatial join by divide and conquer: both sets are repeatedly halved at a coordinate
until few enough boxes are left to compare every pair. A box that crosses the cut
belongs to both halves; duplicate pairs are removed at the end.
"""

from __future__ import annotations

import numpy as np

from elastic_ckpt.core import boxes, columns

# Pairs that are compared at once; with fewer, Python's overhead dominates.
_FEW_PAIRS = 2**14
# The limit of pairs in one comparison of sets that do not halve, to bound memory.
_MANY_PAIRS = 2**22


def overlaps(a: boxes.Boxes, b: boxes.Boxes) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of boxes that share an element.

    Returns:
      The indices in `a` and in `b` of each pair, int64 `[pairs]` both, ordered by the
      first, then by the second.
    """
    overlapping: list[np.ndarray] = []
    all_a = np.flatnonzero(a.volumes)
    all_b = np.flatnonzero(b.volumes)
    pending = [(all_a, all_b)]
    while pending:
        in_a, in_b = pending.pop()
        if len(in_a) * len(in_b) <= _FEW_PAIRS:
            overlapping.append(_compared(a, b, in_a, in_b))
            continue
        halves = _halved(a, b, in_a, in_b)
        if halves is None:
            rows = max(1, _MANY_PAIRS // len(in_b))
            for first in range(0, len(in_a), rows):
                overlapping.append(_compared(a, b, in_a[first : first + rows], in_b))
        else:
            pending.extend(halves)
    pairs = columns.distinct(np.concatenate(overlapping))
    return pairs // max(1, len(b)), pairs % max(1, len(b))


def _compared(
    a: boxes.Boxes, b: boxes.Boxes, in_a: np.ndarray, in_b: np.ndarray
) -> np.ndarray:
    # A pair is encoded as one number, so that pairs sort fast.
    overlap = np.ones((len(in_a), len(in_b)), bool)
    for dim in range(a.rank):
        overlap &= a.start[in_a, dim][:, None] < b.stop[in_b, dim]
        overlap &= b.start[in_b, dim] < a.stop[in_a, dim][:, None]
    at_a, at_b = np.nonzero(overlap)
    return in_a[at_a] * len(b) + in_b[at_b]


def _halved(
    a: boxes.Boxes, b: boxes.Boxes, in_a: np.ndarray, in_b: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    # Cuts at the median start of the larger set, in the dim that leaves the fewest
    # pairs to compare; None if no cut saves a quarter of the comparisons.
    larger = a.start[in_a] if len(in_a) > len(in_b) else b.start[in_b]
    best, least = None, 0.75 * len(in_a) * len(in_b)
    for dim in range(a.rank):
        middle = int(np.median(larger[:, dim]))
        for cut in (middle, middle + 1):
            sides = [
                (in_a[a.start[in_a, dim] < cut], in_b[b.start[in_b, dim] < cut]),
                (in_a[a.stop[in_a, dim] > cut], in_b[b.stop[in_b, dim] > cut]),
            ]
            left = sum(len(first) * len(second) for first, second in sides)
            if left < least:
                best, least = sides, left
    return best
