"""Cuts moves by the fragments of their sources and by the boxes that a host needs."""

from __future__ import annotations

import array
import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.core.boxes import Box, whole
from elastic_ckpt.universal.moves import (
    Arithmetic,
    Fill,
    Move,
    Reduction,
    Side,
    TargetTensor,
)
from elastic_ckpt.universal.plan import factored_dims, strided_runs
from elastic_ckpt.universal.plan.cover import Image, Placed
from elastic_ckpt.universal.plan.piece_table import Buffer, FilledPart, Pieces, Region
from elastic_ckpt.universal.plan.strided_runs import Form
from elastic_ckpt.universal.stored import StoredTensor
from elastic_ckpt.universal.strides import row_major

# The most bytes of a layer of a region; a budget has room for hundreds.
_REGION_BYTES = 2**20
_PLAIN = Arithmetic()
# Stacks need a few; flat ranges are cut in other ways each, and would fill memory.
_MOST_CUTS = 2**14


def cut(
    tensors: Sequence[StoredTensor],
    moves: Iterable[Move],
    fills: Iterable[Fill],
    needed: Mapping[TargetTensor, Sequence[Box]],
) -> Pieces:
    """Cuts moves by the fragments of their sources and the boxes of their targets.

    Args:
      tensors: of the checkpoint.
      moves: of all targets; those into other tensors are left out.
      fills: of all targets.
      needed: the distinct boxes that this host needs, by target.

    Raises:
      CheckpointError: if the fragments of a tensor leave out an element, or sources
        that are reduced have different dtypes.
    """
    return _Cutter(tensors, needed).cut(moves, fills)


class _Piece(NamedTuple):
    # A piece relative to the place of its fragment: `offset` in bytes. `form` and
    # `image` are numbers.
    fragment: int
    offset: int
    form: int
    element: int
    image: int


class _Cutter:
    """Collects pieces in columns."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        needed: Mapping[TargetTensor, Sequence[Box]],
    ) -> None:
        self._tensors = tensors
        self._buffers: list[Buffer] = []
        self._of_target: dict[str, list[int]] = {}
        for tensor, tensor_boxes in needed.items():
            numbers = self._of_target.setdefault(tensor.name, [])
            for box in tensor_boxes:
                numbers.append(len(self._buffers))
                self._buffers.append(
                    Buffer(
                        tensor=tensor,
                        box=box,
                        dtype=np.dtype(tensor.dtype),
                        order=len(self._buffers) << 32,
                    )
                )
        self._regions: list[Region] = []
        self._fills: list[FilledPart] = []
        self._files: dict[str, int] = {}
        self._forms: dict[Form, int] = {}
        self._images: dict[Image, int] = {}
        self._boxes_of_target = {
            tensor.name: tuple(of_tensor) for tensor, of_tensor in needed.items()
        }
        # The pieces of moves that were cut, each with the position of its buffer.
        self._cuts: dict[Any, list[tuple[int, _Piece]]] = {}
        # The numbers of the form and the image of each kind of piece, and the strides
        # of its buffer.
        self._kinds: dict[Any, tuple[int, int, tuple[int, ...]]] = {}
        self._rows = array.array("q")
        self._placed = array.array("q")

    def cut(self, moves: Iterable[Move], fills: Iterable[Fill]) -> Pieces:
        reduced: dict[Any, list[Move]] = collections.defaultdict(list)
        for move in moves:
            if move.target not in self._of_target or not math.prod(move.sizes):
                continue
            arithmetic = move.arithmetic or _PLAIN
            if arithmetic.reduction is Reduction.NONE:
                self._cut(move)
            else:
                key = (move.target, move.sizes, move.target_side, arithmetic)
                reduced[key].append(move)
        for group in reduced.values():
            if len(group) == 1:
                self._cut(group[0])
            else:
                self._reduce(group)
        for fill in fills:
            self._fill(fill)
        rows = np.array(self._rows, np.int64).reshape(-1, 6).T
        placed = np.array(self._placed, np.int64).reshape(-1, 4).T
        return Pieces(
            buffers=self._buffers,
            regions=self._regions,
            fills=self._fills,
            files=list(self._files),
            forms=list(self._forms),
            tensor=rows[0],
            file=rows[1],
            source=rows[2],
            form=rows[3],
            buffer=rows[4],
            element=rows[5],
            placed=Placed(
                buffer=placed[0],
                element=placed[1],
                image=placed[2],
                tensor=placed[3],
                images=tuple(self._images),
            ),
        )

    def _cut(self, move: Move) -> None:
        tensor, numbers = self._tensors[move.source], self._of_target[move.target]
        # Moves that differ in their tensors and files alone are cut in the same way.
        key = (
            move.sizes,
            move.source_side,
            move.target_side,
            move.arithmetic,
            tensor.dtype,
            tuple((fragment.box, fragment.strides) for fragment in tensor.fragments),
            self._boxes_of_target[move.target],
        )
        cuts = self._cuts.get(key)
        if cuts is None:
            every = whole(move.sizes)
            cuts = [
                (position, piece)
                for position, number in enumerate(numbers)
                for part in factored_dims.inside(
                    every, move.target_side, self._buffers[number].box
                )
                for piece in self._pieces(
                    move, part, number, move.target_side, move.arithmetic
                )
            ]
            if len(self._cuts) < _MOST_CUTS:
                self._cuts[key] = cuts
        for position, piece in cuts:
            self._add(move.source, numbers[position], piece)

    def _add(self, source: int, buffer: int, piece: _Piece) -> None:
        fragment = self._tensors[source].fragments[piece.fragment]
        file = self._files.setdefault(fragment.file, len(self._files))
        first = fragment.offset + piece.offset
        self._rows.extend((source, file, first, piece.form, buffer, piece.element))
        self._placed.extend((buffer, piece.element, piece.image, source))

    def _pieces(
        self,
        move: Move,
        part: Box,
        buffer: int,
        side: Side,
        arithmetic: Arithmetic | None,
    ) -> list[_Piece]:
        # The pieces of a part of a move, all of which goes to one buffer.
        tensor, box = self._tensors[move.source], self._buffers[buffer].box
        volume = 0
        pieces = []
        for number, fragment in enumerate(tensor.fragments):
            for piece in factored_dims.inside(part, move.source_side, fragment.box):
                volume += piece.volume
                kind = self._kind(move, piece.shape, fragment.strides, side, box.shape)
                numbers = self._kinds.get((*kind, arithmetic))
                if numbers is None:
                    numbers = self._new_kind(kind, arithmetic)
                form, image, strides = numbers
                index = factored_dims.index_of(piece.start, move.source_side)
                steps = zip(index, fragment.box.start, fragment.strides, strict=True)
                pieces.append(
                    _Piece(
                        fragment=number,
                        offset=sum(
                            (at - start) * stride for at, start, stride in steps
                        ),
                        form=form,
                        element=_element(piece.start, side, box, strides),
                        image=image,
                    )
                )
        if volume != part.volume:
            raise errors.CheckpointError(
                f"{tensor.name} {dict(tensor.ranks) or ''}: the files hold {volume} of"
                f" {part.volume} elements that {self._buffers[buffer]} needs, some"
                " twice or not at all; the checkpoint is damaged, use another step"
            )
        return pieces

    def _kind(
        self,
        move: Move,
        sizes: tuple[int, ...],
        source_strides: tuple[int, ...],
        side: Side,
        shape: tuple[int, ...],
    ) -> tuple[Any, ...]:
        dtype = self._tensors[move.source].dtype
        source = move.source_side
        placed = (sizes, source.dims, source.steps, source_strides)
        return (*placed, side.dims, side.steps, shape, dtype)

    def _new_kind(
        self, kind: tuple[Any, ...], arithmetic: Arithmetic | None
    ) -> tuple[int, int, tuple[int, ...]]:
        sizes, dims, steps, source_strides, to_dims, to_steps, shape, dtype = kind
        strides = row_major(shape)
        form = strided_runs.normalized(
            Form(
                sizes=sizes,
                source_strides=_advances(dims, steps, source_strides),
                buffer_strides=_advances(to_dims, to_steps, strides),
                dtype=dtype,
                scale=(arithmetic or _PLAIN).scale,
                shift=(arithmetic or _PLAIN).shift,
            )
        )
        image = Image.from_factors(sizes, to_dims, to_steps)
        numbers = (
            self._forms.setdefault(form, len(self._forms)),
            self._images.setdefault(image, len(self._images)),
            strides,
        )
        self._kinds[(*kind, arithmetic)] = numbers
        return numbers

    def _image(self, sizes: tuple[int, ...], side: Side) -> int:
        image = Image.from_factors(sizes, side.dims, side.steps)
        return self._images.setdefault(image, len(self._images))

    def _reduce(self, group: list[Move]) -> None:
        move = group[0]
        tensor = self._tensors[move.source]
        for each in group:
            other = self._tensors[each.source]
            if other.dtype != tensor.dtype:
                raise errors.CheckpointError(
                    f"{tensor.name} {dict(tensor.ranks)} is {tensor.dtype.name}, and"
                    f" {other.name} {dict(other.ranks)} is {other.dtype.name}, but"
                    f" both are sources of {move.target}; use another step, or read one"
                    " of them (`unchecked`)"
                )
        tensor_strides = row_major(tensor.shape, tensor.dtype.itemsize)
        side = move.source_side
        strides = _advances(side.dims, side.steps, tensor_strides)
        limits = strided_runs.Limits(
            gap_bytes=2**62, span_bytes=max(tensor.dtype.itemsize, _REGION_BYTES)
        )
        every = whole(move.sizes)
        for number in self._of_target[move.target]:
            box = self._buffers[number].box
            for part in factored_dims.inside(every, move.target_side, box):
                lengths = strided_runs.block(
                    part.shape, strides, tensor.dtype.itemsize, limits
                )
                for region in _grid(part, lengths, strides):
                    self._add_region(group, region, number)

    def _add_region(self, group: list[Move], region: Box, number: int) -> None:
        move, buffer = group[0], self._buffers[number]
        dtype = self._tensors[move.source].dtype
        # A layer has the factored dims themselves as its dims.
        layer_side = Side(
            start=(0,) * len(region.start),
            dims=tuple(range(len(region.start))),
            steps=(1,) * len(region.start),
        )
        order = buffer.order + 1 + len(self._regions)
        layers = []
        for each in group:
            layers.append(len(self._buffers))
            self._buffers.append(
                Buffer(tensor=buffer.tensor, box=region, dtype=dtype, order=order)
            )
            pieces = self._pieces(each, region, layers[-1], layer_side, None)
            for piece in pieces:
                self._add(each.source, layers[-1], piece)
        strides = row_major(buffer.box.shape)
        side = move.target_side
        element = _element(region.start, side, buffer.box, strides)
        itemsize = dtype.itemsize
        self._regions.append(
            Region(
                layers=tuple(layers),
                moves=tuple(group),
                box=region,
                buffer=number,
                element=element,
                form=Form(
                    sizes=region.shape,
                    source_strides=row_major(region.shape, itemsize),
                    buffer_strides=_advances(side.dims, side.steps, strides),
                    dtype=dtype,
                ),
            )
        )
        image = self._image(region.shape, side)
        self._placed.extend((number, element, image, move.source))

    def _fill(self, fill: Fill) -> None:
        box = Box(start=fill.start, stop=fill.stop)
        for number in self._of_target.get(fill.target, ()):
            buffer = self._buffers[number]
            part = boxes.intersect(box, buffer.box)
            if part is None:
                continue
            self._fills.append(
                FilledPart(
                    buffer=number,
                    place=boxes.relative(part, buffer.box),
                    value=fill.value,
                )
            )
            dims = tuple(range(len(part.start)))
            side = Side(start=part.start, dims=dims, steps=(1,) * len(dims))
            strides = row_major(buffer.box.shape)
            element = _element((0,) * len(dims), side, buffer.box, strides)
            image = self._image(part.shape, side)
            self._placed.extend((number, element, image, -1))


def _advances(
    dims: Sequence[int], steps: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    # The strides of the factored dims.
    factors = zip(dims, steps, strict=True)
    return tuple(step * strides[dim] if dim >= 0 else 0 for dim, step in factors)


def _element(start: Sequence[int], side: Side, box: Box, strides: Sequence[int]) -> int:
    index = factored_dims.index_of(start, side)
    offsets = zip(index, box.start, strides, strict=True)
    return sum((at - first) * stride for at, first, stride in offsets)


def _grid(part: Box, lengths: Sequence[int], strides: Sequence[int]) -> Iterator[Box]:
    # Cuts a part into boxes of these lengths, in the order of the strides.
    order = sorted(range(len(lengths)), key=lambda dim: -strides[dim])
    ranges = [range(part.start[dim], part.stop[dim], lengths[dim]) for dim in order]
    for firsts in itertools.product(*ranges):
        start = dict(zip(order, firsts, strict=True))
        stop = {
            dim: min(first + lengths[dim], part.stop[dim])
            for dim, first in start.items()
        }
        dims = range(len(lengths))
        yield Box(
            start=tuple(start[dim] for dim in dims),
            stop=tuple(stop[dim] for dim in dims),
        )
