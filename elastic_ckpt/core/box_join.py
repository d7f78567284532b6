"""Finds all pairs of overlapping boxes from two sets.

This is the first stage of building a read plan. If boxes differ in only one dim,
sorting them by start puts all candidates for a box next to it (a sweep). This handles
arrays that are split in one dim. Otherwise, a divide-and-conquer spatial join halves
both sets at a coordinate until few enough boxes are left to compare every pair. A box
that crosses the cut belongs to both halves; duplicate pairs are removed at the end.
"""

from __future__ import annotations

import numpy as np

from elastic_ckpt.core import boxes, columns

# Pairs compared in one operation; with fewer pairs, Python's overhead dominates.
_FEW_PAIRS = 2**14
# Maximum number of pairs in one comparison of sets that do not halve; bounds memory.
_MANY_PAIRS = 2**22
# Maximum average number of a box's neighbors that a sweep compares.
_NEIGHBORS = 4


def overlaps(a: boxes.Boxes, b: boxes.Boxes) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of boxes that share an element.

    Returns:
      The index in `a` and the index in `b` of each pair, both int64 `[pairs]`, sorted
      by the index in `a`, then by the index in `b`.
    """
    in_a, in_b = np.flatnonzero(a.volumes), np.flatnonzero(b.volumes)
    overlapping = None
    if len(in_a) * len(in_b) > _FEW_PAIRS:
        overlapping = _swept(a, b, in_a, in_b)
    if overlapping is None:
        overlapping = _joined(a, b, in_a, in_b)
    # `np.unique` hashes since NumPy 2.3, which takes much longer.
    pairs = np.sort(overlapping)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    return pairs // max(1, len(b)), pairs % max(1, len(b))


def _swept(
    a: boxes.Boxes, b: boxes.Boxes, in_a: np.ndarray, in_b: np.ndarray
) -> np.ndarray | None:
    # Pairs as from `_compared`; None if boxes have too many neighbors in every dim.
    for dim in range(a.rank):
        by_start = in_b[np.argsort(b.start[in_b, dim], kind="stable")]
        # Boxes before `first` end before the box of `a` starts.
        stops = np.maximum.accumulate(b.stop[by_start, dim])
        first = np.searchsorted(stops, a.start[in_a, dim], side="right")
        last = np.searchsorted(b.start[by_start, dim], a.stop[in_a, dim])
        sizes = np.maximum(last - first, 0)
        if sizes.sum() > _NEIGHBORS * (len(in_a) + len(in_b)):
            continue
        run, within = columns.runs(sizes)
        at_a, at_b = in_a[run], by_start[first[run] + within]
        overlap = np.ones(len(run), bool)
        for each in range(a.rank):
            overlap &= a.start[at_a, each] < b.stop[at_b, each]
            overlap &= b.start[at_b, each] < a.stop[at_a, each]
        return at_a[overlap] * len(b) + at_b[overlap]
    return None


def _joined(
    a: boxes.Boxes, b: boxes.Boxes, all_a: np.ndarray, all_b: np.ndarray
) -> np.ndarray:
    # Pairs as from `_compared`, with duplicates.
    overlapping: list[np.ndarray] = []
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
    return np.concatenate(overlapping)


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
