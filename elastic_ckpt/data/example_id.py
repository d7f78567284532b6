"""Example IDs on devices: two uint32 each, because JAX lacks int64 by default."""

from __future__ import annotations

import numpy as np

# The ID of a padding row.
NONE = 2**64 - 1


def split(ids: np.ndarray) -> np.ndarray:
    """Splits IDs, uint64, into uint32 `[rows, 2]`: the high half, then the low half."""
    return np.stack([ids >> np.uint64(32), ids], axis=1).astype(np.uint32)


def join(halves: np.ndarray) -> list[int]:
    """The inverse of `split`: the IDs in `halves`, uint32 `[rows, 2]`, as a list."""
    return joined(halves).tolist()


def joined(halves: np.ndarray) -> np.ndarray:
    """Like `join`, but returns an array, uint64 `[rows]`."""
    high, low = halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)
    return high << np.uint64(32) | low
