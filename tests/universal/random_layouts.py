"""Random checkpoints with moves into random targets, and what the targets should hold.

Arrays of factored dims are cut along one of them, either over several stored tensors of
one target (shards, stacks), or over several targets of one stored tensor (fused ones).
The order and the products of dims differ on the two sides. Stored tensors lie in files
as boxes, transposed boxes or flat ranges.
"""

import dataclasses
import itertools
import math

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.universal import factors, moves
from elastic_ckpt.universal.formats import checkpoint as stored


@dataclasses.dataclass
class Layout:
    """Stored tensors with their files, moves, and the values of the targets."""

    tensors: list
    moves: list
    files: dict
    targets: dict

    def target_tensors(self):
        return [
            moves.TargetTensor(name=name, dtype=values.dtype, shape=values.shape)
            for name, values in self.targets.items()
        ]


@st.composite
def layouts(draw, dtypes=("float32", "uint16")):
    layout = Layout(tensors=[], moves=[], files={}, targets={})
    for number in range(draw(st.integers(1, 3))):
        dtype = np.dtype(draw(st.sampled_from(dtypes)))
        _add(draw, layout, f"params/{number}", dtype)
    layout.files = {name: bytes(content) for name, content in layout.files.items()}
    return layout


def _add(draw, layout, name, dtype):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    cut = draw(st.integers(0, len(sizes) - 1))
    cuts_drawn = draw(st.sets(st.integers(1, max(1, sizes[cut] - 1)), max_size=2))
    bounds = [
        0,
        *sorted(place for place in cuts_drawn if place < sizes[cut]),
        sizes[cut],
    ]
    ranges = list(itertools.pairwise(bounds))
    fused = draw(st.booleans())
    source_groups, target_groups = draw(_groups(len(sizes))), draw(_groups(len(sizes)))
    values = draw_values(draw, sizes, dtype)
    for part, (start, stop) in enumerate(ranges):
        inside = np.moveaxis(np.moveaxis(values, cut, 0)[start:stop], 0, cut)
        part_sizes = inside.shape
        first = [start if dim == cut else 0 for dim in range(len(sizes))]
        nowhere = [0] * len(sizes)
        if fused:
            # Several targets of one stored tensor.
            if not part:
                _store(draw, layout, name, _joined(values, source_groups))
            target = f"{name}/{part}"
            layout.targets[target] = _joined(inside, target_groups)
            source_side = side(sizes, source_groups, first)
            target_side = side(part_sizes, target_groups, nowhere)
        else:
            target = name
            layout.targets[target] = _joined(values, target_groups)
            _store(draw, layout, f"{name}/{part}", _joined(inside, source_groups))
            source_side = side(part_sizes, source_groups, nowhere)
            target_side = side(sizes, target_groups, first)
        layout.moves.append(
            moves.Move(
                target=target,
                sizes=part_sizes,
                source=len(layout.tensors) - 1,
                source_side=source_side,
                target_side=target_side,
            )
        )


def draw_values(draw, sizes, dtype):
    """Values of random bits that are no NaN where they are added up."""
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(
        0, 256, math.prod(sizes) * dtype.itemsize
    )
    return bits.astype(np.uint8).view(dtype).reshape(sizes)


@st.composite
def _groups(draw, rank):
    # The dims of a tensor, each the factored dims that it is the product of.
    order = draw(st.permutations(range(rank)))
    cuts = draw(st.sets(st.integers(0, rank)))
    bounds = [0, *sorted(cuts), rank]
    groups = [tuple(order[a:b]) for a, b in itertools.pairwise(bounds)]
    # A dim of no factors has length 1.
    return groups


def _joined(values, groups):
    order = [factor for group in groups for factor in group]
    shape = [math.prod(values.shape[factor] for factor in group) for group in groups]
    return np.ascontiguousarray(values.transpose(order)).reshape(shape)


def side(sizes, groups, first):
    """The side of a part of factored dims that begins at `first` of them."""
    dims, steps = [0] * len(sizes), [0] * len(sizes)
    start = []
    for dim, group in enumerate(groups):
        step = 1
        at = 0
        for factor in reversed(group):
            dims[factor], steps[factor] = dim, step
            at += first[factor] * step
            step *= sizes[factor]
        start.append(at)
    return moves.Side(start=tuple(start), dims=tuple(dims), steps=tuple(steps))


def _store(draw, layout, name, values):
    file = draw(st.sampled_from(["a.bin", "b.bin"]))
    content = layout.files.setdefault(file, bytearray())
    kind = draw(st.sampled_from(["box", "transposed", "ranges"]))
    fragments = []
    if kind == "ranges":
        cuts_drawn = draw(st.sets(st.integers(0, values.size), max_size=3))
        for start, stop in itertools.pairwise(sorted({0, *cuts_drawn, values.size})):
            offset = _append(draw, content, values.ravel()[start:stop])
            strides = _strides(values)
            for box in factors.boxes_of_range(values.shape, start, stop):
                at = sum(a * b for a, b in zip(box.start, strides, strict=True))
                fragments.append(
                    stored.Fragment(
                        box=box,
                        file=file,
                        offset=offset + at - start * values.itemsize,
                        strides=strides,
                    )
                )
    else:
        if kind == "transposed":
            offset = _append(draw, content, values.T)
            strides = tuple(reversed(_strides(np.ascontiguousarray(values.T))))
        else:
            offset = _append(draw, content, values)
            strides = _strides(values)
        fragments.append(
            stored.Fragment(
                box=boxes.whole(values.shape), file=file, offset=offset, strides=strides
            )
        )
    layout.tensors.append(
        stored.StoredTensor(
            name=name,
            dtype=values.dtype,
            shape=values.shape,
            fragments=tuple(draw(st.permutations(fragments))),
        )
    )


def _append(draw, content, values):
    content += bytes(draw(st.sampled_from([0, 1, 8, 100])))
    content += values.tobytes()
    return len(content) - values.nbytes


def _strides(values):
    sizes = values.shape
    return tuple(
        values.itemsize * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))
    )
