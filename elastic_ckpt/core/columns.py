"""Helpers for NumPy columns of integers that are used as tables of runs."""

from __future__ import annotations

import numpy as np


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values, ascending.

    Sorts them: `np.unique` hashes since NumPy 2.3, which takes three times as long for
    1e6 numbers.
    """
    ordered = np.sort(values)
    fresh = np.ones(len(ordered), bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return ordered[fresh]


def runs(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The run of each row of consecutive runs, and its position in that run.

    Args:
      sizes: the rows of each run.

    Returns:
      int64 `[rows]` both.
    """
    ends = np.cumsum(sizes)
    run = np.repeat(np.arange(len(sizes)), sizes)
    return run, np.arange(len(run)) - (ends - sizes)[run]
