"""Arithmetic on values between files and arrays: scale, shift, cast, derive tensors.

A derived tensor is read like a stored one. Its parts are virtual files of at most
16 MiB in row-major order, each of which is computed from boxes of the operands, one
operand after another. Elements are computed independently, so cutting a tensor
differently does not change them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import ml_dtypes
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import Derived, Matched, Operand, is_half_a_byte
from elastic_ckpt.universal.reading import sources
from elastic_ckpt.universal.reading.sources import VirtualFile

_CACHE_LINE_BYTES = 64
# The lengths of a tile along the fastest dims of `into` and `values`. NumPy copies rows
# along the former in a loop over the latter.
_ROW, _COLUMN = 64, 128
# Copying fewer elements takes less time than the call itself.
_FEW_ELEMENTS = 1024
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Reads a box of a stored tensor, given the tensor's index.
ReadBox = Callable[[int, Box], np.ndarray]


def changed(values: np.ndarray, scale: float, shift: float, view: str) -> np.ndarray:
    """Applies `view`, then multiplies by `scale` and adds `shift`, in float32 or wider.

    `StoredTensor` describes `view`.

    Raises:
      CheckpointError: as `widened`.
    """
    values = np.conjugate(values) if "conj" in view else values
    values = -values if "neg" in view else values
    if (scale, shift) == (1, 0):
        return values
    with np.errstate(all="ignore"):
        return widened(values) * scale + shift


def widened(values: np.ndarray) -> np.ndarray:
    """Casts values to floats of at least 32 bits for computations.

    Raises:
      CheckpointError: if an integer would be rounded.
    """
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8 and values.size:
        most = max(abs(int(values.min())), int(values.max()))
        if most > 2**53:
            raise errors.CheckpointError(
                f"{most} cannot be scaled or averaged without rounding; change the "
                "layout to read these integers unchanged"
            )
    with np.errstate(all="ignore"):
        return values.astype(_wide(values.dtype), copy=False)


def is_safe(stored: np.dtype, dtype: np.dtype) -> bool:
    """Whether a cast from `stored` to `dtype` keeps all values or only rounds them."""
    # NumPy's answer is wrong for ml_dtypes' narrow floats.
    return stored == dtype or (dtype.itemsize > 1 and np.can_cast(stored, dtype))


@np.errstate(all="ignore")
def check_cast(values: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Checks that a cast to `dtype` preserves the values.

    A cast to a floating-point dtype may round but must not overflow to infinity. `name`
    is the target's name, used in error messages.

    Raises:
      CheckpointError: if `dtype` cannot represent a value.
    """
    if is_safe(values.dtype, dtype):
        return
    is_real = values.dtype.kind == "c" != dtype.kind
    numbers = values.real if is_real else values
    made = numbers.astype(dtype)
    if dtype.kind == "b" or "int" in dtype.name:
        # An integer may wrap around in the cast and back again in the comparison.
        is_kept = made.astype(numbers.dtype) == numbers
        is_kept &= (made < 0) == (numbers < 0)
    elif np.isfinite(np.array(np.inf).astype(dtype)):
        # Dtypes without infinity saturate.
        is_kept = abs(numbers.astype(np.float64)) <= float(ml_dtypes.finfo(dtype).max)
    else:
        is_kept = np.isfinite(made) | ~np.isfinite(numbers)
    if is_real:
        is_kept &= values.imag == 0
    if not is_kept.all():
        raise errors.CheckpointError(
            f"{name}: {values[~is_kept].flat[0]} cannot be represented in {dtype.name};"
            " use a different target dtype"
        )


@np.errstate(all="ignore")
def copy(into: np.ndarray, values: np.ndarray) -> None:
    """Copies `values` to `into`, which has the same shape, and casts them to its dtype.

    NumPy copies in the memory order of one side. A transposing copy then loads a cache
    line for each element of the other side and is four times as slow. This function
    transposes in tiles that fit into the cache on both sides. The strides of `into`
    must descend, as in a `Form`.
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
    # A tile with the other dims would exceed the cache.
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
    # Dtypes narrower than bfloat16 do not promote.
    return wide if ml_dtypes.finfo(wide).bits >= 32 else np.dtype(np.float32)


def stored_of(matched: Matched, source: int, num_stored: int) -> list[int]:
    """The indices of the stored tensors that a move's source is computed from."""
    if source < num_stored:
        return [source]
    return [each.tensor for each in matched.derived[source - num_stored].operands]


def tensors(
    derived: Sequence[Derived],
    used: Collection[int],
    stored: Sequence[StoredTensor],
    read: ReadBox,
    virtual: dict[str, VirtualFile],
) -> list[StoredTensor]:
    """Describes derived tensors as stored ones and adds their files to `virtual`.

    `used` has the indices of the tensors to read; only these get files.

    Raises:
      CheckpointError: if tensors to compare or add up have different dtypes.
    """
    made = []
    for number, each in enumerate(derived, len(stored)):
        name = stored[each.operands[0].tensor].name
        tensor = StoredTensor(name=name, dtype=each.dtype, shape=each.shape)
        if number in used:
            if each.how in ("equal", "mean", "sum"):
                _check_dtypes(each, stored)
            make = functools.partial(_make, each, stored, read)
            chunk = [1] * len(each.shape)
            tensor = sources.in_parts(number, tensor, chunk, make, virtual)
        made.append(tensor)
    return made


def computed(
    spec: Derived, box: Box, stored: Sequence[StoredTensor], read: ReadBox
) -> np.ndarray:
    """Computes a box of a derived tensor.

    Raises:
      CheckpointError: if values that should be identical differ in any bit, or integers
        would be rounded.
    """
    operands = (_aligned(each, box, stored, read) for each in spec.operands)
    first = next(operands)
    if spec.how == "equal":
        for operand, other in zip(spec.operands[1:], operands, strict=True):
            _check_equal(spec, box, stored, operand, first, other)
        return first
    if spec.how == "sum" and "int" in first.dtype.name:
        # Python integers because a sum of 8-byte integers may need more than 64 bits.
        wide = np.dtype(object if first.dtype.itemsize == 8 else np.int64)
        total = functools.reduce(np.add, operands, first.astype(wide))
        try:
            return total.astype(spec.dtype)
        except OverflowError as error:
            raise errors.CheckpointError(
                f"{stored[spec.operands[0].tensor].name}: the sum over all ranks"
                f" overflows {spec.dtype.name}; use a different step"
            ) from error
    with np.errstate(all="ignore"):
        total = widened(first).astype(spec.dtype, copy=False)
        if spec.how == "plus":
            left, right = map(widened, operands)
            for at in range(left.shape[-1]):
                total += spec.factor * (left[..., at] * right[..., at])
        elif spec.how == "times":
            for other in operands:
                total *= widened(other)
            total *= spec.factor
        else:
            for other in operands:
                total += widened(other)
            if spec.how == "mean":
                total = total / len(spec.operands)
    return total


def _make(
    spec: Derived,
    stored: Sequence[StoredTensor],
    read: ReadBox,
    box: Box,
    memory: np.ndarray,
) -> None:
    memory.view(spec.dtype).reshape(box.shape)[...] = computed(spec, box, stored, read)


def _aligned(
    operand: Operand, box: Box, stored: Sequence[StoredTensor], read: ReadBox
) -> np.ndarray:
    # Reads the part of an operand that a box of the derived tensor needs. The part's
    # dims are in the derived tensor's order, with length 1 where the operand is
    # constant; the dim that `plus` contracts is last.
    start, stop = [], []
    shape = stored[operand.tensor].shape
    half = is_half_a_byte(operand.viewed_as)
    for dim, block, size in zip(operand.dims, operand.blocks, shape, strict=True):
        start.append(box.start[dim] // block if dim >= 0 else 0)
        stop.append(-(-box.stop[dim] // block) if dim >= 0 else size)
    first = start.copy()
    if half:
        start[-1], stop[-1] = start[-1] // 2, -(-stop[-1] // 2)
        first[-1] = 2 * start[-1]
    found = read(operand.tensor, Box(start=tuple(start), stop=tuple(stop)))
    if half:
        # Splits each byte into two elements, the low half first.
        found = found.view(np.uint8)
        found = np.stack([found & 15, found >> 4], -1).reshape(*found.shape[:-1], -1)
    if operand.viewed_as is not None:
        found = found.view(operand.viewed_as)
    for axis, (dim, block) in enumerate(zip(operand.dims, operand.blocks, strict=True)):
        if dim >= 0 and (block > 1 or half):
            at = np.arange(box.start[dim], box.stop[dim]) // block - first[axis]
            found = found.take(at, axis)
    rank = len(box.shape)
    order = sorted(range(len(shape)), key=lambda axis: operand.dims[axis] % (rank + 1))
    absent = sorted({*range(rank)} - {*operand.dims})
    return np.expand_dims(found.transpose(order), tuple(absent))


def _check_dtypes(spec: Derived, stored: Sequence[StoredTensor]) -> None:
    first, *others = (stored[each.tensor] for each in spec.operands)
    for other in others:
        if other.dtype != first.dtype:
            raise errors.CheckpointError(
                f"{first.name} {_rank(first)} is {first.dtype.name}, and"
                f" {other.name} {_rank(other)} is {other.dtype.name}, but the layout"
                " combines them into one tensor; use a different step, or set"
                " `unchecked` to read only one of them"
            )


def _check_equal(
    spec: Derived,
    box: Box,
    stored: Sequence[StoredTensor],
    operand: Operand,
    first: np.ndarray,
    second: np.ndarray,
) -> None:
    differs = (_bits(first) != _bits(second)).any(axis=-1)
    if not differs.any():
        return
    element = np.unravel_index(int(np.argmax(differs)), differs.shape)
    index = [int(at) + low for at, low in zip(element, box.start, strict=True)]
    tensor, other = stored[spec.operands[0].tensor], stored[operand.tensor]
    raise errors.CheckpointError(
        f"{tensor.name} {_rank(tensor)} and {other.name} {_rank(other)}"
        f" differ at {index}: {first[element]} and {second[element]}; the layout"
        " requires them to be equal. Use a different step, or change the layout: set"
        " `mean` to average the ranks, `unchecked` to read only one of them, or"
        " `copy: unchecked` if one tensor is a copy of the other"
    )


def _bits(array: np.ndarray) -> np.ndarray:
    # The elements as unsigned integers, with a new last dim.
    return array[..., None].view(_BITS.get(array.itemsize, np.uint8))


def _rank(tensor: StoredTensor) -> str:
    ranks = ", ".join(f"{axis} {number}" for axis, number in tensor.ranks)
    return f"on rank {ranks}" if ranks else "in the checkpoint"
