"""Strides of arrays."""

from __future__ import annotations

import functools
import itertools


@functools.lru_cache(maxsize=2**16)
def row_major(shape: tuple[int, ...], itemsize: int = 1) -> tuple[int, ...]:
    """The strides of an array in row-major order, in units of `itemsize`."""
    sizes = [*shape[1:], itemsize][::-1] if shape else []
    return tuple(itertools.accumulate(sizes, lambda a, b: a * b))[::-1]
