"""What is done with values between a file and an array: scale, shift, cast, copy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from elastic_ckpt.core import errors

_CACHE_LINE_BYTES = 64
# The elements of a tile along the fastest dim of either side. NumPy copies rows of the
# first kind in a loop over the second.
_ROW, _COLUMN = 64, 128
# With fewer, a call takes longer than its copy.
_FEW_ELEMENTS = 1024


def changed(values: np.ndarray, scale: float, shift: float, view: str) -> np.ndarray:
    """`values * scale + shift`, in float32 at least.

    Args:
      values: as they are stored.
      scale: their factor.
      shift: added to them.
      view: of the stored tensor, see `StoredTensor`.

    Raises:
      CheckpointError: see `widened`.
    """
    values = np.conjugate(values) if "conj" in view else values
    values = -values if "neg" in view else values
    if (scale, shift) == (1, 0):
        return values
    with np.errstate(all="ignore"):
        return widened(values) * scale + shift


def widened(values: np.ndarray) -> np.ndarray:
    """Values as the floats that are computed with, of 32 bits at least.

    Raises:
      CheckpointError: if an integer would be rounded.
    """
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8 and values.size:
        most = max(abs(int(values.min())), int(values.max()))
        if most > 2**53:
            raise errors.CheckpointError(
                f"{most} cannot be scaled or averaged without rounding it; read these "
                "integers as they are"
            )
    with np.errstate(all="ignore"):
        return values.astype(_wide(values.dtype), copy=False)


@np.errstate(all="ignore")
def check_cast(values: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Checks that integers, flags and reals remain what they are as another dtype.

    Reals and integers are rounded to floats, but do not become infinite.

    Args:
      values: that are cast.
      dtype: that they are cast to.
      name: of the target, for the error.

    Raises:
      CheckpointError: if a value is not one of the dtype.
    """
    if np.can_cast(values.dtype, dtype):
        return
    if values.dtype.kind == "c" != dtype.kind:
        is_kept = values.imag == 0
    else:
        made = values.astype(dtype)
        is_kept = np.isfinite(made) | ~np.isfinite(values)
        if dtype.kind == "b" or "int" in dtype.name:
            # An integer may wrap, and wrap back.
            is_kept = made.astype(values.dtype) == values
            is_kept &= (made < 0) == (values < 0)
    if not is_kept.all():
        raise errors.CheckpointError(
            f"{name}: {values[~is_kept].flat[0]} is no {dtype.name}; give the target"
            " another dtype"
        )


@np.errstate(all="ignore")
def copy(into: np.ndarray, values: np.ndarray) -> None:
    """Copies elements, cast to the dtype of `into`.

    NumPy copies in the order of one side: where one transposes the other, the other one
    takes a cache line for each element, and is four times as slow. Such a copy is made
    tile by tile: a tile fits into the cache on both sides.

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


def _wide(dtype: np.dtype) -> np.dtype:
    wide = np.result_type(dtype, np.float32)
    # Types of fewer bits than bfloat16 do not promote.
    return wide if ml_dtypes.finfo(wide).bits >= 32 else np.dtype(np.float32)
