"""Applies the moves of a layout with NumPy, element by element: the oracle of tests."""

import dataclasses
import functools
import operator

import numpy as np

from elastic_ckpt.universal.moves import Reduction, TargetTensor
from elastic_ckpt.universal.rules.matching import moves
from elastic_ckpt.universal.stored import StoredTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A tensor of a checkpoint, with its values."""

    name: str
    values: np.ndarray
    ranks: tuple[tuple[str, int], ...] = ()
    kind: str = "parameter"


def saved(name, values, kind="parameter", **ranks):
    ranked = tuple(sorted(ranks.items()))
    return Saved(name=name, values=np.asarray(values), ranks=ranked, kind=kind)


def stored(tensors):
    return [
        StoredTensor(
            name=each.name,
            dtype=each.values.dtype,
            shape=each.values.shape,
            ranks=each.ranks,
            kind=each.kind,
        )
        for each in tensors
    ]


def targets_like(arrays):
    return {
        name: TargetTensor(name=name, dtype=array.dtype, shape=array.shape)
        for name, array in arrays.items()
    }


def relayout(layout, tensors, axes=None, *, targets=None):
    """The arrays of the target; each element is filled once.

    `tensors` are `Saved`, or arrays by name; `targets` are arrays of the same shapes.
    """
    if isinstance(tensors, dict):
        tensors = [saved(name, values) for name, values in tensors.items()]
    like = None if targets is None else targets_like(targets)
    matched = moves(layout, stored(tensors), axes or {}, like)
    arrays = {
        name: np.zeros(each.shape, each.dtype) for name, each in matched.targets.items()
    }
    times = {name: np.zeros(array.shape, int) for name, array in arrays.items()}
    for move in matched.moves:
        contracted = [f for f, dim in enumerate(move.target_side.dims) if dim < 0]
        values = [
            np.broadcast_to(
                view(tensors[source.tensor].values, source.viewed_as)[
                    elements(source.side, move.sizes)
                ],
                move.sizes,
            )
            for source in move.sources
        ]
        at = elements(move.target_side, move.sizes)
        arithmetic = move.arithmetic
        one = reduced(arithmetic, values, tuple(contracted))
        first = tuple(
            0 if f in contracted else slice(None) for f in range(len(move.sizes))
        )
        at = tuple(each[first] for each in at)
        put(arrays[move.target], at, one, arithmetic)
        np.add.at(times[move.target], at, 1)
    for fill in matched.fills:
        at = tuple(map(slice, fill.start, fill.stop))
        arrays[fill.target][at] = fill.value
        times[fill.target][at] += 1
    assert all((count == 1).all() for count in times.values())
    return arrays


def view(values, dtype):
    if dtype is None or dtype == values.dtype:
        return values
    if dtype.name == "float4_e2m1fn":
        halves = np.stack([values & 15, values >> 4], axis=-1).reshape(
            *values.shape[:-1], -1
        )
        return halves.astype(np.uint8).view(dtype)
    return values.view(dtype)


def reduced(arithmetic, copies, contracted):
    reduction = Reduction.NONE if arithmetic is None else arithmetic.reduction
    values = copies[0]
    if reduction is Reduction.NONE:
        assert len(copies) == 1
        return values
    assert len(copies) > 1
    if reduction is Reduction.EQUAL:
        assert all((copy == values).all() for copy in copies)
        return values
    # As DeepSpeed does it: one after another, in float32.
    wide = np.result_type(values.dtype, np.float32)
    wides = [copy.astype(wide) for copy in copies]
    if reduction is Reduction.PRODUCT:
        return functools.reduce(operator.mul, wides) * arithmetic.factor
    if reduction is Reduction.LOW_RANK:
        first = wides[0].take(0, contracted[0])
        return first + arithmetic.factor * (wides[1] * wides[2]).sum(contracted[0])
    values = sum(wides)
    return values / len(copies) if reduction is Reduction.MEAN else values


def put(array, at, values, arithmetic):
    if arithmetic is not None and (arithmetic.scale, arithmetic.shift) != (1, 0):
        values = np.asarray(values, np.float64) * arithmetic.scale + arithmetic.shift
    array[at] = np.asarray(values).astype(array.dtype)


def elements(side, sizes):
    """The indices of the elements of a side, an array for each dim of the tensor."""
    numbers = np.indices(sizes)
    indices = [np.full(sizes, start) for start in side.start]
    for factor, (dim, step) in enumerate(zip(side.dims, side.steps, strict=True)):
        if dim >= 0:
            indices[dim] = indices[dim] + numbers[factor] * step
    return tuple(indices)


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype, name
        assert array.shape == expected[name].shape, name
        assert array.tobytes() == expected[name].tobytes(), name


def numbered(*shape, dtype=np.float32, start=0):
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=dtype).reshape(
        shape
    )
