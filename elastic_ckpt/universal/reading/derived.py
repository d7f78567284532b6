"""Computes derived tensors: what replicas, ranks and quantized weights are together.

A derived tensor is read like a stored one. Its parts are virtual files of at most
16 MiB in row-major order: a part is computed of the boxes of its operands, one operand
after the other. Elements are computed one by one, so that they are the same in any cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import Derived, Matched, Operand, is_half_a_byte
from elastic_ckpt.universal.reading import sources, values
from elastic_ckpt.universal.reading.sources import VirtualFile

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Reads a box of a stored tensor, by its number.
ReadBox = Callable[[int, Box], np.ndarray]


def stored_of(matched: Matched, source: int, num_stored: int) -> list[int]:
    """The numbers of the stored tensors that a source of a move is made of.

    Args:
      matched: that has the move.
      source: its number.
      num_stored: of tensors of the checkpoint.
    """
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
    """Derived tensors as stored ones, with fragments in virtual files if they are used.

    Args:
      derived: by number.
      used: the numbers of the tensors that are read; these follow the stored ones.
      stored: the tensors of the checkpoint.
      read: reads a box of one of these.
      virtual: to which the files are added.

    Raises:
      CheckpointError: if tensors that are compared or added up have different dtypes.
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
    """The values of a box of a derived tensor.

    Args:
      spec: the tensor.
      box: of it.
      stored: the tensors of the checkpoint.
      read: reads a box of one of these.

    Raises:
      CheckpointError: if values that should be equal differ in a bit, or integers would
        be rounded.
    """
    operands = (_aligned(each, box, stored, read) for each in spec.operands)
    first = next(operands)
    if spec.how == "equal":
        for operand, other in zip(spec.operands[1:], operands, strict=True):
            _check_equal(spec, box, stored, operand, first, other)
        return first
    if spec.how == "sum" and first.dtype.kind in "iu":
        # Python's integers where a sum may have more than 64 bits.
        wide = np.dtype(object if first.dtype.itemsize == 8 else np.int64)
        total = functools.reduce(np.add, operands, first.astype(wide))
        try:
            return total.astype(spec.dtype)
        except OverflowError as error:
            raise errors.CheckpointError(
                f"{stored[spec.operands[0].tensor].name}: the sum over all ranks is no"
                f" {spec.dtype.name}; use another step"
            ) from error
    with np.errstate(all="ignore"):
        total = values.widened(first).astype(spec.dtype, copy=False)
        if spec.how == "plus":
            left, right = map(values.widened, operands)
            for at in range(left.shape[-1]):
                total += spec.factor * (left[..., at] * right[..., at])
        elif spec.how == "times":
            for other in operands:
                total *= values.widened(other)
            total *= spec.factor
        else:
            for other in operands:
                total += values.widened(other)
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
    # What a box of the derived tensor needs of an operand, with dims in its order, of
    # length 1 where the operand is constant; last the one that `plus` adds up over.
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
        # Two elements of each byte, the lower half first.
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
                f"{first.name} of {_rank(first)} is {first.dtype.name}, and"
                f" {other.name} of {_rank(other)} is {other.dtype.name}, but the layout"
                " makes one tensor of them; use another step, or read one of them"
                " (`unchecked`)"
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
        f"{tensor.name} of {_rank(tensor)} and {other.name} of {_rank(other)}"
        f" differ at {index}: {first[element]} and {second[element]}; the layout"
        " requires that they are equal. Use `mean` if ranks have been averaged,"
        " `unchecked` to read one of them, `copy: unchecked` for a copy of another"
        " tensor, or another step"
    )


def _bits(array: np.ndarray) -> np.ndarray:
    # The elements as unsigned numbers, under one more dim.
    return array[..., None].view(_BITS.get(array.itemsize, np.uint8))


def _rank(tensor: StoredTensor) -> str:
    ranks = ", ".join(f"{axis} {number}" for axis, number in tensor.ranks)
    return f"rank {ranks}" if ranks else "the checkpoint"
