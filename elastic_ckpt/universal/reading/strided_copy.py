"""Copies between strided views, tile by tile where one transposes the other.

NumPy copies in the order of one side: the other one then takes a cache line for each
element, and is four times as slow. A tile fits into the cache on both sides. A tile is
as fast as the transposing transfer of `jax.device_put(values.T)`, and needs no second
copy of the array.
"""

from __future__ import annotations

import itertools

import numpy as np

_CACHE_LINE_BYTES = 64
_TILE_ROWS = 64
_TILE_ROW_BYTES = 256
# With fewer, a call takes longer than its copy.
_FEW_ELEMENTS = 1024


def copy(into: np.ndarray, values: np.ndarray) -> None:
    """Copies elements, cast to the dtype of `into`.

    Args:
      into: writable; its strides descend, as those of a form do.
      values: of the same shape.
    """
    with np.errstate(all="ignore"):
        tiles = _tiles(into, values)
        if tiles is None:
            np.copyto(into, values, casting="unsafe")
            return
        for tile in tiles:
            np.copyto(into[tile], values[tile], casting="unsafe")


def _tiles(
    into: np.ndarray, values: np.ndarray
) -> itertools.product[tuple[slice | int, ...]] | None:
    # The tiles, or None if one call is as fast.
    if into.ndim < 2 or into.size < 4 * _FEW_ELEMENTS:
        return None
    inner = into.ndim - 1
    across = int(np.argmin(values.strides))
    if across == inner or values.strides[inner] <= _CACHE_LINE_BYTES:
        return None
    lengths = list(into.shape)
    lengths[inner] = max(1, _TILE_ROW_BYTES // into.itemsize)
    lengths[across] = _TILE_ROWS
    tile = min(lengths[inner], into.shape[inner]) * min(_TILE_ROWS, into.shape[across])
    if tile >= _FEW_ELEMENTS:
        # The other dims are few calls more, and would have tiles exceed the cache.
        lengths = [
            length if dim in (inner, across) else 1
            for dim, length in enumerate(lengths)
        ]
    return itertools.product(
        *(
            [slice(start, start + length) for start in range(0, size, length)]
            for size, length in zip(into.shape, lengths, strict=True)
        )
    )
