"""Copies between strided views, tile by tile where one transposes the other.

NumPy copies in the order of one side: the other one then takes a cache line for each
element, and is four times as slow. A tile fits into the cache on both sides. A tile is
as fast as the transposing transfer of `jax.device_put(values.T)`, and needs no second
copy of the array.
"""

from __future__ import annotations

import numpy as np

_CACHE_LINE_BYTES = 64
# The elements of a tile along the fastest dim of either side. NumPy copies rows of the
# first kind in a loop over the second.
_ROW, _COLUMN = 64, 128
# With fewer, a call takes longer than its copy.
_FEW_ELEMENTS = 1024


@np.errstate(all="ignore")
def copy(into: np.ndarray, values: np.ndarray) -> None:
    """Copies elements, cast to the dtype of `into`.

    Args:
      into: writable; its strides descend, as those of a form do.
      values: of the same shape.
    """
    inner = into.ndim - 1
    if inner < 1 or into.size < 4 * _FEW_ELEMENTS:
        into[...] = values
        return
    across = int(np.argmin(values.strides))
    if across == inner or values.strides[inner] <= _CACHE_LINE_BYTES:
        into[...] = values
        return
    rows, columns = into.shape[inner], into.shape[across]
    if min(rows, _ROW) * min(columns, _COLUMN) < _FEW_ELEMENTS:
        _copy_tiles(into, values, across)
        return
    # The other dims would have a tile exceed the cache.
    into, values = np.moveaxis(into, across, -2), np.moveaxis(values, across, -2)
    for outer in np.ndindex(into.shape[:-2]):
        _copy_tiles(into[outer], values[outer], 0)


def _copy_tiles(into: np.ndarray, values: np.ndarray, across: int) -> None:
    into, values = np.moveaxis(into, across, 0), np.moveaxis(values, across, 0)
    for row in range(0, into.shape[-1], _ROW):
        into_row = into[..., row : row + _ROW]
        values_row = values[..., row : row + _ROW]
        for column in range(0, len(into), _COLUMN):
            after = column + _COLUMN
            into_row[column:after] = values_row[column:after]
