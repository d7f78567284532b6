"""Which boxes of one set meet which of another: what every read plan starts from.

Both sets are halved at a coordinate again and again, until few enough are left to
compare each with each (a spatial join by divide and conquer). A box that the cut goes
through is on both sides, and its pairs are found twice and told once.
"""

from __future__ import annotations

import numpy as np

from elastic_ckpt.core import boxes, columns

# Pairs that are compared at once; fewer, and Python's own time weighs more.
_FEW_PAIRS = 2**14
# Rows of a comparison that does not halve, so that it stays in memory.
_MANY_PAIRS = 2**22


def overlaps(a: boxes.Boxes, b: boxes.Boxes) -> tuple[np.ndarray, np.ndarray]:
    """The pairs that share an element.

    Returns:
      The places in `a` and in `b` of each pair, int64 `[pairs]` both, ordered by the
      first, then by the second.
    """
    found: list[np.ndarray] = []
    all_a = np.flatnonzero(a.volumes)
    all_b = np.flatnonzero(b.volumes)
    pending = [(all_a, all_b)]
    while pending:
        of_a, of_b = pending.pop()
        if len(of_a) * len(of_b) <= _FEW_PAIRS:
            found.append(_compared(a, b, of_a, of_b))
            continue
        halves = _halved(a, b, of_a, of_b)
        if halves is None:
            rows = max(1, _MANY_PAIRS // len(of_b))
            for first in range(0, len(of_a), rows):
                found.append(_compared(a, b, of_a[first : first + rows], of_b))
        else:
            pending.extend(halves)
    pairs = columns.distinct(np.concatenate(found))
    return pairs // max(1, len(b)), pairs % max(1, len(b))


def _compared(
    a: boxes.Boxes, b: boxes.Boxes, of_a: np.ndarray, of_b: np.ndarray
) -> np.ndarray:
    # A pair is one number, so that pairs sort fast.
    meets = np.ones((len(of_a), len(of_b)), bool)
    for dim in range(a.rank):
        meets &= a.start[of_a, dim][:, None] < b.stop[of_b, dim]
        meets &= b.start[of_b, dim] < a.stop[of_a, dim][:, None]
    at_a, at_b = np.nonzero(meets)
    return of_a[at_a] * len(b) + of_b[at_b]


def _halved(
    a: boxes.Boxes, b: boxes.Boxes, of_a: np.ndarray, of_b: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    # The dim is that in which the larger set has the most bounds; None if no cut of it
    # leaves much less to compare.
    larger = a.start[of_a] if len(of_a) > len(of_b) else b.start[of_b]
    best, least = None, 0.75 * len(of_a) * len(of_b)
    for dim in range(a.rank):
        middle = int(np.median(larger[:, dim]))
        for cut in (middle, middle + 1):
            sides = [
                (of_a[a.start[of_a, dim] < cut], of_b[b.start[of_b, dim] < cut]),
                (of_a[a.stop[of_a, dim] > cut], of_b[b.stop[of_b, dim] > cut]),
            ]
            left = sum(len(first) * len(second) for first, second in sides)
            if left < least:
                best, least = sides, left
    return best
