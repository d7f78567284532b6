"""Old moves as new ones; goes with the old algebra."""

import ml_dtypes
import numpy as np

from elastic_ckpt.universal import moves as old
from elastic_ckpt.universal import new_moves as new


def adapted(matched, tensors):
    derived, known = [], {}
    moves = []
    for move in matched.moves:
        done = move.arithmetic or old.Arithmetic()
        number = move.source
        viewed = move.sources[0].viewed_as
        if len(move.sources) > 1 or viewed is not None:
            first = move.sources[0]
            tensor = tensors[first.tensor]
            how = {
                "none": "equal",
                "equal": "equal",
                "mean": "mean",
                "sum": "sum",
                "product": "times",
                "low_rank": "plus",
            }[done.reduction.value]
            shape = list(tensor.shape)
            if new.is_half_a_byte(viewed):
                shape[-1] *= 2
            dtype = np.dtype(viewed or tensor.dtype)
            if how == "sum" and dtype.kind in "iu":
                dtype = np.dtype(np.int64)
            elif how != "equal":
                wide = np.result_type(dtype, np.float32)
                dtype = (
                    wide if ml_dtypes.finfo(wide).bits >= 32 else np.dtype(np.float32)
                )
            operands = tuple(
                _operand(each, first, move.target_side) for each in move.sources
            )
            spec = new.Derived(
                how=how,
                operands=operands,
                shape=tuple(shape),
                dtype=dtype,
                factor=done.factor,
            )
            number = known.setdefault(
                (how, operands, spec.factor), len(tensors) + len(derived)
            )
            if number == len(tensors) + len(derived):
                derived.append(spec)
        moves.append(_move(move, number, done))
    fills = [
        new.Fill(target=f.target, start=f.start, stop=f.stop, value=f.value)
        for f in matched.fills
    ]
    targets = {
        name: new.TargetTensor(name=t.name, dtype=t.dtype, shape=t.shape)
        for name, t in matched.targets.items()
    }
    return new.Matched(
        moves=moves, derived=derived, fills=fills, targets=targets, rules=matched.rules
    )


def _side(side, kept):
    return new.Side(
        start=side.start,
        dims=tuple(side.dims[k] for k in kept),
        steps=tuple(side.steps[k] for k in kept),
    )


def _move(move, number, done):
    kept = [k for k, d in enumerate(move.target_side.dims) if d >= 0]
    return new.Move(
        target=move.target,
        sizes=tuple(move.sizes[k] for k in kept),
        target_side=_side(move.target_side, kept),
        source=number,
        source_side=_side(move.source_side, kept),
        scale=done.scale,
        shift=done.shift,
    )


def _operand(source, first, target_side):
    dims, blocks = [], []
    side = source.side
    for e in range(len(side.start)):
        fs = [f for f, d in enumerate(side.dims) if d == e]
        if source is first:
            dims.append(e), blocks.append(1)
        elif any(target_side.dims[f] < 0 for f in fs):
            dims.append(-1), blocks.append(1)
        elif not fs:
            if side == first.side:
                dims.append(e), blocks.append(1)
            else:
                assert side.start[e] == 0
                free = [d for d in range(len(first.side.start)) if d not in dims]
                dims.append(free[0]), blocks.append(2**62)
        else:
            d = first.side.dims[fs[0]]
            block = first.side.steps[fs[0]] // side.steps[fs[0]]
            assert all(first.side.dims[f] == d for f in fs), (source, first)
            assert all(first.side.steps[f] == block * side.steps[f] for f in fs)
            assert side.start[e] == first.side.start[d] // block, (source, first)
            dims.append(d), blocks.append(block)
    return new.Operand(source.tensor, tuple(dims), tuple(blocks), source.viewed_as)


def to_old(targets):
    return {
        name: old.TargetTensor(name=t.name, dtype=t.dtype, shape=t.shape)
        for name, t in targets.items()
    }
