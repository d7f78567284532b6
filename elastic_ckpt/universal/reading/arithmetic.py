"""Arithmetic on values while they are read: reductions, scale and shift."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.moves import Reduction
from elastic_ckpt.universal.plan import factored_dims
from elastic_ckpt.universal.plan.piece_table import Region
from elastic_ckpt.universal.stored import StoredTensor

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def scaled(values: np.ndarray, scale: float, shift: float) -> np.ndarray:
    """`values * scale + shift`, in float32 at least; `values` itself if that is all."""
    if scale == 1 and shift == 0:
        return values
    with np.errstate(all="ignore"):
        result = values.astype(_wide(values.dtype))
        result *= scale
        result += shift
    return result


def reduced(
    region: Region, layers: Sequence[np.ndarray], tensors: Sequence[StoredTensor]
) -> np.ndarray:
    """The values of a region, of its sources in their order.

    Args:
      region: of a plan.
      layers: the values of its sources, of equal shape and dtype.
      tensors: of the checkpoint, for the error.

    Returns:
      An array of the shape of the layers, which may be the first of them.

    Raises:
      CheckpointError: if they should be equal, and differ in a bit.
    """
    arithmetic = region.moves[0].arithmetic
    assert arithmetic is not None
    if arithmetic.reduction is Reduction.EQUAL:
        _check_equal(region, layers, tensors)
        total = layers[0]
    else:
        with np.errstate(all="ignore"):
            total = layers[0].astype(_wide(layers[0].dtype))
            for layer in layers[1:]:
                total += layer
            if arithmetic.reduction is Reduction.MEAN:
                total = total / len(layers)
    return scaled(total, arithmetic.scale, arithmetic.shift)


def _wide(dtype: np.dtype) -> np.dtype:
    wide = np.result_type(dtype, np.float32)
    # Types of fewer bits than bfloat16 do not promote.
    return wide if ml_dtypes.finfo(wide).bits >= 32 else np.dtype(np.float32)


def _check_equal(
    region: Region, layers: Sequence[np.ndarray], tensors: Sequence[StoredTensor]
) -> None:
    first = _bits(layers[0])
    for move, layer in zip(region.moves[1:], layers[1:], strict=True):
        differs = (first != _bits(layer)).any(axis=-1)
        if not differs.any():
            continue
        element = np.unravel_index(int(np.argmax(differs)), differs.shape)
        numbers = [
            int(at) + start for at, start in zip(element, region.box.start, strict=True)
        ]
        index = factored_dims.index_of(numbers, move.source_side)
        tensor, other = tensors[region.moves[0].source], tensors[move.source]
        raise errors.CheckpointError(
            f"{tensor.name} of {_rank(tensor)} and {other.name} of {_rank(other)}"
            f" differ at {index}: {layers[0][element]} and {layer[element]}; the layout"
            " requires that they are equal. Use `mean` if ranks have been averaged,"
            " `unchecked` to read one of them, or another step"
        )


def _bits(values: np.ndarray) -> np.ndarray:
    # The elements as unsigned numbers, under one more dim.
    plain = _BITS.get(values.itemsize, np.uint8)
    return values[..., None].view(plain)


def _rank(tensor: StoredTensor) -> str:
    ranks = ", ".join(f"{axis} {number}" for axis, number in tensor.ranks)
    return f"rank {ranks}" if ranks else "the checkpoint"
