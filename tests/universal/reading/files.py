"""Tensors in files of a directory, and what is read of them."""

import contextlib
import itertools
import pathlib

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.universal.factors import boxes_of_range, row_major
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.moves import Matched, Move, Side, TargetTensor
from elastic_ckpt.universal.reading.engine import Reader
from elastic_ckpt.universal.rules import matching
from tests.universal import random_layouts


class Files:
    """Arrays in one file each, as stored tensors with ranks."""

    def __init__(self, directory):
        self.directory = directory
        self.tensors = []

    def add(self, values, *, name="w", ranks=(), view=""):
        """Adds an array; returns the path of its file."""
        file = self.directory / f"{len(self.tensors)}.bin"
        file.write_bytes(values.tobytes())
        fragment = stored.Fragment(
            box=boxes.whole(values.shape),
            file=str(file),
            offset=0,
            strides=row_major(values.shape, values.itemsize),
        )
        self.tensors.append(
            stored.StoredTensor(
                name=name,
                ranks=ranks,
                dtype=values.dtype,
                shape=values.shape,
                fragments=(fragment,) if values.size else (),
                view=view,
            )
        )
        return str(file)

    def targets(self):
        """Targets like the tensors."""
        return [
            target_of(*each.shape, dtype=each.dtype, name=each.name)
            for each in self.tensors
        ]

    def moves(self, **options):
        """Moves of each tensor to the target of its name."""
        numbered = enumerate(self.targets())
        return [move(each, source=number, **options) for number, each in numbered]

    def read(self, target, derived=(), *, source=None, **options):
        """The values of a target that one tensor is moved to."""
        source = len(self.tensors) + len(derived) - 1 if source is None else source
        moved = move(target, source=source, **options)
        return read_all(self.tensors, [moved], [target], derived=derived)[target.name]


@st.composite
def layouts(draw, directory):
    """Tensors in files, the moves of a random layout, its targets and their values."""
    values_of, sizes, both = draw(random_layouts.relations("rs", 2, 0))
    dtype = np.dtype(draw(st.sampled_from(["float32", "uint16", "int8"])))
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).bytes(512 * dtype.itemsize)
    sources, targets = (
        {
            name: np.asarray(np.frombuffer(bits, dtype)[numbers.astype(int)])
            for name, numbers in random_layouts.arrays_of(
                side, values_of, sizes
            ).items()
        }
        for side in both
    )
    contents = {str(directory / name): bytearray() for name in ("a.bin", "b.bin")}
    tensors = [_stored(draw, contents, *each) for each in sources.items()]
    for file, content in contents.items():
        pathlib.Path(file).write_bytes(content)
    layout = random_layouts.layout_of(sizes, both)
    wanted = [
        target_of(*each.shape, dtype=dtype, name=name) for name, each in targets.items()
    ]
    matched = matching.moves(layout, tensors, {}, {each.name: each for each in wanted})
    return tensors, matched.moves, wanted, targets


def _stored(draw, contents, name, values):
    # As a box, a transposed box or flat ranges.
    file = draw(st.sampled_from(sorted(contents)))
    strides = row_major(values.shape, values.itemsize)

    def append(part):
        contents[file].extend(bytes(draw(st.sampled_from([0, 1, 8]))))
        contents[file].extend(part.tobytes())
        return len(contents[file]) - part.nbytes

    fragments = []
    kind = draw(st.sampled_from(["box", "transposed", "ranges"]))
    if kind == "ranges":
        bounds = {0, values.size, *draw(st.sets(st.integers(0, values.size)))}
        for start, stop in itertools.pairwise(sorted(bounds)):
            offset = append(values.ravel()[start:stop]) - start * values.itemsize
            for box in boxes_of_range(values.shape, start, stop):
                at = offset + int(np.dot(box.start, strides))
                fragments.append((box, at, strides))
    elif kind == "transposed":
        turned = row_major(values.T.shape, values.itemsize)[::-1]
        fragments.append((boxes.whole(values.shape), append(values.T), turned))
    else:
        fragments.append((boxes.whole(values.shape), append(values), strides))
    return stored.StoredTensor(
        name=name,
        dtype=values.dtype,
        shape=values.shape,
        fragments=tuple(
            stored.Fragment(box=box, file=file, offset=at, strides=strides)
            for box, at, strides in draw(st.permutations(fragments))
        ),
    )


def move(target, *, source=0, order=None, **options):
    """A move of a whole tensor; `order` has the target's dim of each of its own."""
    rank = len(target.shape)
    own = tuple(range(rank))
    order = own if order is None else order
    return Move(
        target=target.name,
        sizes=tuple(target.shape[dim] for dim in order),
        target_side=Side(start=(0,) * rank, dims=tuple(order), steps=(1,) * rank),
        source=source,
        source_side=Side(start=(0,) * rank, dims=own, steps=(1,) * rank),
        **options,
    )


def target_of(*shape, dtype="float32", name="w"):
    """A target."""
    return TargetTensor(name=name, dtype=np.dtype(dtype), shape=shape)


def matched_of(moves, targets, *, derived=(), fills=()):
    """Moves to targets by name."""
    return Matched(moves=moves, derived=derived, fills=fills, targets=targets, rules=[])


def reader_of(
    tensors, moves, targets, *, derived=(), fills=(), checksums=None, **options
):
    """A reader of targets."""
    checkpoint = stored.Checkpoint(
        format="test", tensors=tensors, checksums=checksums or stored.no_checksums
    )
    named = {each.name: each for each in targets}
    matched = matched_of(moves, named, derived=derived, fills=fills)
    return Reader(checkpoint, matched, named, **options)


def read_units(reader, units):
    """The target, box and a copy of the values of each buffer, in order."""
    found = []
    with contextlib.closing(reader.read(units)) as groups:
        for group in groups:
            found += [(each.target, each.box, each.values.copy()) for each in group]
    return found


def read_all(tensors, moves, targets, **options):
    """The values of whole targets, by name."""
    reader = reader_of(tensors, moves, targets, **options)
    units = [(each, [boxes.whole(each.shape)]) for each in targets]
    return {target.name: values for target, _, values in read_units(reader, units)}


def cut(shape, bounds):
    """The boxes of a grid that begins at `bounds` in each dim; none is empty."""
    ends = [
        itertools.pairwise(sorted({0, size, *(at % size for at in chosen)}))
        for size, chosen in zip(shape, bounds, strict=True)
    ]
    return [
        boxes.Box(start=tuple(a for a, _ in each), stop=tuple(b for _, b in each))
        for each in itertools.product(*ends)
    ]
