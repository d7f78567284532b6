"""Random checkpoints with moves into random targets, and what the targets should hold.

Arrays of factored dims are cut along one of them, in one way over stored tensors
(shards, stacks, fused tensors) and in another way over targets. The order and the
products of dims differ on the two sides. Stored tensors lie in files as boxes,
transposed boxes or flat ranges.
"""

import dataclasses
import itertools
import math

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.universal import factors, moves
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats import checkpoint as stored


@dataclasses.dataclass
class Layout:
    """Stored tensors with their files, moves, and the values of the targets."""

    tensors: list = dataclasses.field(default_factory=list)
    moves: list = dataclasses.field(default_factory=list)
    files: dict = dataclasses.field(default_factory=dict)
    targets: dict = dataclasses.field(default_factory=dict)

    def target_tensors(self):
        return [
            moves.TargetTensor(name=name, dtype=values.dtype, shape=values.shape)
            for name, values in self.targets.items()
        ]


@st.composite
def layouts(draw, dtypes=("float32", "uint16")):
    layout = Layout()
    for number in range(draw(st.integers(1, 3))):
        _add(draw, layout, f"p{number}", np.dtype(draw(st.sampled_from(dtypes))))
    return layout


def _add(draw, layout, name, dtype):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(sizes) - 1))
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).bytes(math.prod(sizes) * dtype.itemsize)
    values = np.frombuffer(bits, dtype).reshape(sizes)

    def parts():
        bounds = sorted({0, sizes[dim], *draw(st.sets(st.integers(0, sizes[dim])))})
        return list(itertools.pairwise(bounds))

    def cut(start, stop):
        return values[(*[slice(None)] * dim, slice(start, stop))]

    of_stored, of_targets = draw(_groups(len(sizes))), draw(_groups(len(sizes)))
    first, sources, targets = len(layout.tensors), parts(), parts()
    for number, bounds in enumerate(sources):
        _store(draw, layout, f"{name}.{number}", _joined(cut(*bounds), of_stored))
    for number, bounds in enumerate(targets):
        layout.targets[f"{name}.{number}"] = _joined(cut(*bounds), of_targets)
    for (source, (a, b)), (target, (c, d)) in itertools.product(
        enumerate(sources), enumerate(targets)
    ):
        start, stop = max(a, c), min(b, d)
        if start < stop:
            layout.moves.append(
                moves.Move(
                    target=f"{name}.{target}",
                    sizes=cut(start, stop).shape,
                    source=first + source,
                    source_side=_side(cut(a, b).shape, of_stored, dim, start - a),
                    target_side=_side(cut(c, d).shape, of_targets, dim, start - c),
                )
            )


@st.composite
def _groups(draw, rank):
    # The dims of a tensor, each the factored dims that it is the product of; one of
    # none has length 1.
    order = draw(st.permutations(range(rank)))
    bounds = [0, *sorted(draw(st.sets(st.integers(0, rank)))), rank]
    return [tuple(order[a:b]) for a, b in itertools.pairwise(bounds)]


def _joined(values, groups):
    order = [factor for group in groups for factor in group]
    shape = [math.prod(values.shape[factor] for factor in group) for group in groups]
    return np.ascontiguousarray(values.transpose(order)).reshape(shape)


def _side(sizes, groups, cut, first):
    # Where a part begins that is the one from `first` on along the factored dim `cut`.
    dims, steps, start = [0] * len(sizes), [0] * len(sizes), [0] * len(groups)
    for dim, group in enumerate(groups):
        step = 1
        for factor in reversed(group):
            dims[factor], steps[factor] = dim, step
            start[dim] += first * step if factor == cut else 0
            step *= sizes[factor]
    return moves.Side(start=tuple(start), dims=tuple(dims), steps=tuple(steps))


def _store(draw, layout, name, values):
    file = draw(st.sampled_from(["a.bin", "b.bin"]))
    strides = row_major(values.shape, values.itemsize)

    def append(part):
        content = layout.files.get(file, b"") + bytes(draw(st.sampled_from([0, 1, 8])))
        layout.files[file] = content + part.tobytes()
        return len(content)

    fragments = []
    kind = draw(st.sampled_from(["box", "transposed", "ranges"]))
    if kind == "ranges":
        bounds = {0, values.size, *draw(st.sets(st.integers(0, values.size)))}
        for start, stop in itertools.pairwise(sorted(bounds)):
            offset = append(values.ravel()[start:stop]) - start * values.itemsize
            for box in factors.boxes_of_range(values.shape, start, stop):
                at = offset + np.dot(box.start, strides).item()
                fragments.append((box, at, strides))
    elif kind == "transposed":
        turned = row_major(values.T.shape, values.itemsize)[::-1]
        fragments.append((boxes.whole(values.shape), append(values.T), turned))
    else:
        fragments.append((boxes.whole(values.shape), append(values), strides))
    layout.tensors.append(
        stored.StoredTensor(
            name=name,
            dtype=values.dtype,
            shape=values.shape,
            fragments=tuple(
                stored.Fragment(box=box, file=file, offset=at, strides=strides)
                for box, at, strides in draw(st.permutations(fragments))
            ),
        )
    )
