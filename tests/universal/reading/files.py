"""Tensors in files of a directory, and what is read of them."""

import contextlib
import dataclasses
import itertools

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.moves import Matched, Move, Side, TargetTensor
from elastic_ckpt.universal.reading.engine import Reader


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


def reader_of(
    tensors, moves, targets, *, derived=(), fills=(), checksums=None, **options
):
    """A reader of targets."""
    checkpoint = Checkpoint(format="test", tensors=tensors)
    if checksums is not None:
        checkpoint = dataclasses.replace(checkpoint, checksums=checksums)
    named = {each.name: each for each in targets}
    matched = Matched(
        moves=moves, derived=derived, fills=fills, targets=named, rules=[]
    )
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
    corners = (zip(*each, strict=True) for each in itertools.product(*ends))
    return [boxes.Box(start=start, stop=stop) for start, stop in corners]
