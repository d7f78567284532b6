"""Applies the moves of a layout with NumPy, element by element: the oracle of tests."""

import dataclasses

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
    reduced = {}
    for move in matched.moves:
        values = tensors[move.source].values[elements(move.source_side, move.sizes)]
        at = elements(move.target_side, move.sizes)
        arithmetic = move.arithmetic
        if arithmetic is not None and arithmetic.reduction is not Reduction.NONE:
            key = (move.target, move.target_side, move.sizes)
            reduced.setdefault(key, (arithmetic, at, []))[2].append(values)
            continue
        put(arrays[move.target], at, values, arithmetic)
        np.add.at(times[move.target], at, 1)
    for (name, _, _), (arithmetic, at, copies) in reduced.items():
        assert len(copies) > 1
        values = copies[0]
        if arithmetic.reduction is Reduction.EQUAL:
            assert all((copy == values).all() for copy in copies)
        else:
            # As DeepSpeed does it: one after another, in float32.
            wide = np.result_type(values.dtype, np.float32)
            values = sum(copy.astype(wide) for copy in copies)
            if arithmetic.reduction is Reduction.MEAN:
                values = values / len(copies)
        put(arrays[name], at, values, arithmetic)
        np.add.at(times[name], at, 1)
    for fill in matched.fills:
        at = tuple(map(slice, fill.start, fill.stop))
        arrays[fill.target][at] = fill.value
        times[fill.target][at] += 1
    assert all((count == 1).all() for count in times.values())
    return arrays


def put(array, at, values, arithmetic):
    if arithmetic is not None and (arithmetic.scale, arithmetic.shift) != (1, 0):
        values = np.asarray(values, np.float64) * arithmetic.scale + arithmetic.shift
    array[at] = np.asarray(values).astype(array.dtype)


def elements(side, sizes):
    """The indices of the elements of a side, an array for each dim of the tensor."""
    numbers = np.indices(sizes)
    indices = [np.full(sizes, start) for start in side.start]
    for factor, (dim, step) in enumerate(zip(side.dims, side.steps, strict=True)):
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
