"""Applies the moves of a layout with NumPy, element by element: the oracle of tests."""

import dataclasses
import functools
import hashlib
import json
import math
import operator

import numpy as np

from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.matching import moves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(StoredTensor):
    """A tensor of a checkpoint, with its values."""

    values: np.ndarray


def saved(name, values, kind="parameter", **ranks):
    values = np.asarray(values)
    return Saved(
        name=name,
        dtype=values.dtype,
        shape=values.shape,
        ranks=tuple(sorted(ranks.items())),
        kind=kind,
        values=values,
    )


def rule(source, target, **options):
    return {"from": source, "to": target, **options}


def layout(*rules, **keys):
    return Layout.parse(json.dumps({"version": 1, "rules": list(rules), **keys}))


def layout_of_one(source, target, **options):
    return layout(rule(source, target, **options))


def relayout(made_by, tensors, axes=None, targets=None):
    """The arrays of the target; each element is filled once.

    `tensors` are `Saved`, or arrays by name; `targets` are arrays of the same shapes.
    """
    if isinstance(tensors, dict):
        tensors = [saved(name, values) for name, values in tensors.items()]
    if targets is not None:
        targets = {
            name: TargetTensor(name=name, dtype=array.dtype, shape=array.shape)
            for name, array in targets.items()
        }
    matched = moves(made_by, tensors, axes or {}, targets)
    values = [each.values for each in tensors]
    values += [derived(each, values) for each in matched.derived]
    arrays = {
        name: np.zeros(each.shape, each.dtype) for name, each in matched.targets.items()
    }
    times = {name: np.zeros(array.shape, np.int8) for name, array in arrays.items()}
    filled = dict.fromkeys(arrays, 0)
    for move in matched.moves:
        of = elements(values[move.source], move.source_side, move.sizes)
        into, counts = (
            elements(each[move.target], move.target_side, move.sizes)
            for each in (arrays, times)
        )
        if (move.scale, move.shift) != (1, 0):
            of = np.asarray(of, np.float64) * move.scale + move.shift
        into[...] = np.asarray(of).astype(into.dtype)
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


def derived(spec, stored):
    """The values of a derived tensor."""
    first, *others = (
        aligned(each, stored[each.tensor], spec) for each in spec.operands
    )
    assert first.shape[:-1] == spec.shape
    if spec.how == "equal":
        assert spec.dtype == first.dtype
        assert all((each == first).all() for each in others)
        return first[..., 0]
    # As DeepSpeed does it: one after another, in float32.
    first, *others = (each.astype(spec.dtype) for each in (first, *others))
    if spec.how == "plus":
        product = (others[0] * others[1]).sum(-1, keepdims=True)
        return (first + spec.factor * product)[..., 0]
    combine = operator.mul if spec.how == "times" else operator.add
    values = functools.reduce(combine, others, first)[..., 0]
    if spec.how == "mean":
        return values / len(spec.operands)
    return values * values.dtype.type(spec.factor)


def aligned(operand, array, spec):
    """The elements of an operand, by the derived dims, and that of `plus`."""
    array = view(array, operand.viewed_as)
    count = array.shape[operand.dims.index(-1)] if -1 in operand.dims else 1
    indices = np.indices((*spec.shape, count), sparse=True)
    index = tuple(
        indices[dim] // block
        for dim, block in zip(operand.dims, operand.blocks, strict=True)
    )
    return np.broadcast_to(array[index], (*spec.shape, count))


def view(values, dtype):
    """Bytes as another dtype has them."""
    if dtype is None or dtype == values.dtype:
        return values
    if dtype.name in ("float4_e2m1fn", "uint4", "int4"):
        halves = np.stack([values & 15, values >> 4], axis=-1)
        halves = halves.reshape(*values.shape[:-1], -1).astype(np.uint8)
        return halves.astype(dtype) if dtype.name == "uint4" else halves.view(dtype)
    return values.view(dtype)


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
