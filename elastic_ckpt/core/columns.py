"""Helpers for tables whose columns are NumPy arrays of integers."""

from __future__ import annotations

import numpy as np


def packed(*columns: np.ndarray) -> list[np.ndarray]:
    """Packs columns of non-negative integers into as few uint64 `[n]` as possible.

    The packed rows compare in the same order as the original rows.
    """
    keys: list[np.ndarray] = []
    bits_left = 0
    for column in columns:
        bits = int(column.max(initial=0)).bit_length()
        if not keys or bits > bits_left:
            keys.append(column.astype(np.uint64))
            bits_left = 64 - bits
            continue
        keys[-1] <<= np.uint64(bits)
        keys[-1] |= column.astype(np.uint64)
        bits_left -= bits
    return keys


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the distinct rows, in ascending order, and maps each row to one of them.

    This function sorts one integer for each row: `np.unique` with an axis takes twenty
    times as long.

    Args:
      rows: int64 `[n, columns]`.

    Returns:
      The index of each distinct row's first occurrence, int64 `[distinct]`; and the
      position of each row among the distinct rows, int64 `[n]`.
    """
    if not rows.size:
        return np.arange(min(1, len(rows))), np.zeros(len(rows), np.int64)
    keys = packed(*(rows - rows.min(axis=0)).T)
    while len(keys) > 1:
        keys = packed(*(np.unique(key, return_inverse=True)[1] for key in keys))
    _, firsts, number = np.unique(keys[0], return_index=True, return_inverse=True)
    return firsts, number


def runs(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's run and position in it, for consecutive runs of rows.

    Args:
      sizes: the number of rows in each run.

    Returns:
      The index of each row's run and the row's position in that run, both int64
      `[rows]`.
    """
    ends = np.cumsum(sizes)
    run = np.repeat(np.arange(len(sizes)), sizes)
    return run, np.arange(len(run)) - (ends - sizes)[run]
