"""Arithmetic on values while they are read: reductions, scale and shift."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import Arithmetic, Reduction
from elastic_ckpt.universal.plan import factored_dims
from elastic_ckpt.universal.plan.pieces import Region
from elastic_ckpt.universal.rules import dtypes

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def scaled(values: np.ndarray, scale: float, shift: float) -> np.ndarray:
    """`values * scale + shift`, in float32 at least.

    Returns:
      `values` itself if scale is 1 and shift 0.
    """
    if scale == 1 and shift == 0:
        return values
    _check_exact(values)
    with np.errstate(all="ignore"):
        result = values.astype(_wide(values.dtype))
        result *= scale
        result += shift
    return result


def check_cast(values: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Checks that integers, flags and reals remain what they are as another dtype.

    Reals are rounded to those of fewer bits, but do not become infinite.

    Args:
      values: that are cast.
      dtype: that they are cast to.
      name: of the target, for the error.

    Raises:
      CheckpointError: if a value is not one of the dtype.
    """
    if values.dtype == dtype or not values.size:
        return
    wrong = _differing(values, dtype)
    if wrong is not None and wrong.any():
        found = values[np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
        raise errors.CheckpointError(
            f"{name}: {found} is no {dtype.name}; give the target another dtype"
        )


def _differing(values: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    # Which values are none of a dtype; None if all are.
    if values.dtype.kind == "c":
        return values.imag != 0 if dtype.kind != "c" else None
    if dtype.kind == "b":
        return (values != 0) & (values != 1)
    if not dtypes.is_integer(dtype):
        return _too_large(values, dtype)
    limits = ml_dtypes.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    if values.dtype.kind in "biu":
        if values.dtype.kind == "b" or np.can_cast(values.dtype, dtype):
            return None
        return (values < least) | (values > most)
    if values.dtype == object:
        return np.array([not least <= n <= most for n in values.flat]).reshape(
            values.shape
        )
    with np.errstate(all="ignore"):
        wide = values.astype(_wide(values.dtype))
        # The most of 64 bits is no float; the number after it is.
        return ~((wide >= least) & (wide < most + 1) & (np.floor(wide) == wide))


def _too_large(values: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    # Which reals have no exponent in a dtype.
    most = float(ml_dtypes.finfo(dtype).max)
    if values.dtype == object or dtypes.is_integer(values.dtype):
        return None
    if values.dtype.kind == "b" or float(ml_dtypes.finfo(values.dtype).max) < 2 * most:
        return None
    with np.errstate(all="ignore"):
        wrong = np.isfinite(values) & (np.abs(values) > values.dtype.type(most))
        # Some are rounded to the most.
        if wrong.any():
            wrong &= ~np.isfinite(values.astype(dtype))
    return wrong


def _check_exact(values: np.ndarray) -> None:
    # That float64, in which integers of 64 bits are scaled, has them.
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8 and values.size:
        most = max(abs(int(values.min())), int(values.max()))
        if most > 2**53:
            raise errors.CheckpointError(
                f"{most} cannot be scaled or averaged without rounding it; read these "
                "integers as they are"
            )


def viewed(values: np.ndarray, view: str) -> np.ndarray:
    """The values of a view of a stored tensor, see `StoredTensor`."""
    if "conj" in view:
        values = np.conjugate(values)
    return -values if "neg" in view else values


def reduced(
    region: Region, layers: Sequence[np.ndarray], tensors: Sequence[StoredTensor]
) -> np.ndarray:
    """The values of a region, of its sources in their order.

    Args:
      region: of a plan.
      layers: the values of its sources, of equal shape and dtype but for products.
      tensors: of the checkpoint, for the error.

    Returns:
      An array of the region's form, which may be in the memory of the first layer.

    Raises:
      CheckpointError: if they should be equal, and differ in a bit.
    """
    arithmetic = region.move.arithmetic or Arithmetic()
    layers = [_unpacked(region, number, layer) for number, layer in enumerate(layers)]
    first = layers[0]
    if arithmetic.reduction is Reduction.EQUAL:
        _check_equal(region, layers, tensors)
    elif arithmetic.reduction is not Reduction.NONE:
        with np.errstate(all="ignore"):
            first = _combined(region, arithmetic, layers)
    values = scaled(first, arithmetic.scale, arithmetic.shift)
    return np.broadcast_to(values, region.form.sizes)


def _combined(
    region: Region, arithmetic: Arithmetic, layers: Sequence[np.ndarray]
) -> np.ndarray:
    if arithmetic.reduction is Reduction.SUM and layers[0].dtype.kind in "iu":
        # Python's integers where a sum may have more than 64 bits.
        wide = np.dtype(object if layers[0].dtype.itemsize == 8 else np.int64)
        return np.sum([layer.astype(wide) for layer in layers], axis=0)
    for layer in layers:
        _check_exact(layer)
    total = layers[0].astype(_wide(layers[0].dtype))
    if arithmetic.reduction is Reduction.PRODUCT:
        for layer in layers[1:]:
            total = total * layer.astype(_wide(layer.dtype))
        return total * arithmetic.factor
    if arithmetic.reduction is Reduction.LOW_RANK:
        # Element by element, so that the result is the same in any cut.
        (shared,) = (
            dim for dim, of_target in enumerate(region.move.target_side.dims)
            if of_target < 0
        )  # fmt: skip
        left, right = (each.astype(_wide(each.dtype)) for each in layers[1:])
        for at in range(left.shape[shared]):
            product = left.take([at], shared) * right.take([at], shared)
            total = total + arithmetic.factor * product
        return total
    for layer in layers[1:]:
        total += layer
    if arithmetic.reduction is Reduction.MEAN:
        total = total / len(layers)
    return total


def _unpacked(region: Region, number: int, layer: np.ndarray) -> np.ndarray:
    # Two elements of each byte, the lower half first.
    factor, dtype = region.halves[number], region.move.sources[number].viewed_as
    if factor is None or dtype is None:
        return layer
    halves = np.stack([layer & 15, layer >> 4], axis=factor + 1)
    shape = list(layer.shape)
    shape[factor] *= 2
    first = region.box.start[factor] % 2
    elements = range(first, first + region.box.shape[factor])
    return halves.reshape(shape).view(dtype).take(elements, factor)


def _wide(dtype: np.dtype) -> np.dtype:
    wide = np.result_type(dtype, np.float32)
    # Types of fewer bits than bfloat16 do not promote.
    return wide if ml_dtypes.finfo(wide).bits >= 32 else np.dtype(np.float32)


def _check_equal(
    region: Region, layers: Sequence[np.ndarray], tensors: Sequence[StoredTensor]
) -> None:
    first = _bits(layers[0])
    for source, layer in zip(region.move.sources[1:], layers[1:], strict=True):
        differs = (first != _bits(layer)).any(axis=-1)
        if not differs.any():
            continue
        element = np.unravel_index(int(np.argmax(differs)), differs.shape)
        numbers = [
            int(at) + start for at, start in zip(element, region.box.start, strict=True)
        ]
        index = factored_dims.index_of(numbers, source.side)
        tensor, other = tensors[region.move.source], tensors[source.tensor]
        raise errors.CheckpointError(
            f"{tensor.name} of {_rank(tensor)} and {other.name} of {_rank(other)}"
            f" differ at {index}: {layers[0][element]} and {layer[element]}; the layout"
            " requires that they are equal. Use `mean` if ranks have been averaged,"
            " `unchecked` to read one of them, `copy: unchecked` for a copy of another"
            " tensor, or another step"
        )


def _bits(values: np.ndarray) -> np.ndarray:
    # The elements as unsigned numbers, under one more dim.
    plain = _BITS.get(values.itemsize, np.uint8)
    return values[..., None].view(plain)


def _rank(tensor: StoredTensor) -> str:
    ranks = ", ".join(f"{axis} {number}" for axis, number in tensor.ranks)
    return f"rank {ranks}" if ranks else "the checkpoint"
