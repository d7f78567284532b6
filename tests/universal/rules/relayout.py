"""Applies the moves of a layout with NumPy, element by element: the oracle of tests."""

import dataclasses
import functools
import hashlib
import json
import math
import operator

import numpy as np

from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import Reduction, TargetTensor
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.matching import moves


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


def rule(source, target, **options):
    return {"from": source, "to": target, **options}


def layout(*rules, **keys):
    return Layout.parse(json.dumps({"version": 1, "rules": list(rules), **keys}))


def layout_of_one(source, target, **options):
    return layout(rule(source, target, **options))


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


def relayout(made_by, tensors, axes=None, *, targets=None):
    """The arrays of the target; each element is filled once.

    `tensors` are `Saved`, or arrays by name; `targets` are arrays of the same shapes.
    """
    if isinstance(tensors, dict):
        tensors = [saved(name, values) for name, values in tensors.items()]
    like = None if targets is None else targets_like(targets)
    matched = moves(made_by, stored(tensors), axes or {}, like)
    arrays = {
        name: np.zeros(each.shape, each.dtype) for name, each in matched.targets.items()
    }
    times = {name: np.zeros(array.shape, np.int8) for name, array in arrays.items()}
    filled = dict.fromkeys(arrays, 0)
    for move in matched.moves:
        contracted = tuple(f for f, dim in enumerate(move.target_side.dims) if dim < 0)
        values = [
            elements(
                view(tensors[source.tensor].values, source.viewed_as),
                source.side,
                move.sizes,
            )
            for source in move.sources
        ]
        first = tuple(
            0 if f in contracted else slice(None) for f in range(len(move.sizes))
        )
        into, counts = (
            elements(each[move.target], move.target_side, move.sizes)[(*first, ...)]
            for each in (arrays, times)
        )
        put(into, reduced(move.arithmetic, values, contracted), move.arithmetic)
        counts += 1
        filled[move.target] += counts.size
    for fill in matched.fills:
        at = tuple(map(slice, fill.start, fill.stop))
        arrays[fill.target][at] = fill.value
        times[fill.target][at] += 1
        filled[fill.target] += times[fill.target][at].size
    for name, count in times.items():
        assert (count == 1).all(), name
        assert filled[name] == count.size, name
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


def put(array, values, arithmetic):
    if arithmetic is not None and (arithmetic.scale, arithmetic.shift) != (1, 0):
        values = np.asarray(values, np.float64) * arithmetic.scale + arithmetic.shift
    array[...] = np.asarray(values).astype(array.dtype)


def elements(array, side, sizes):
    """The elements of a side, as a view of its tensor."""
    strides, last = [], list(side.start)
    for dim, step, size in zip(side.dims, side.steps, sizes, strict=True):
        strides.append(array.strides[dim] * step if dim >= 0 else 0)
        if dim >= 0:
            assert step >= 0
            last[dim] += (size - 1) * step
    if math.prod(sizes):
        pairs = zip(side.start, last, array.shape, strict=True)
        assert all(0 <= a <= b < size for a, b, size in pairs)
    begin = array[(*(slice(start, None) for start in side.start), ...)]
    return np.lib.stride_tricks.as_strided(begin, sizes, strides)


def digest(arrays):
    """A digest of the names, dtypes, shapes and values of arrays."""
    made = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays.items()):
        made.update(f"{name} {array.dtype} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


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
