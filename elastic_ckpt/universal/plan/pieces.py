"""Cuts moves by the fragments of their sources and by the boxes that a host needs.

What a move copies into a box is a few *pieces*: strided copies from a fragment into the
buffer of the box. Sources that are reduced fill separate buffers, the layers of a
region of a bounded size; a region is complete when its layers are, and its result is
then a piece of the target's box.

A matched layout has each element of a target once (`rules.instance`), and the fragments
of a tensor have each of its elements once, which is checked here. So have the pieces.

Glossary: n pieces.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.core import box_join, boxes, errors
from elastic_ckpt.core.boxes import Box, Boxes, whole
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import (
    Arithmetic,
    Fill,
    Move,
    Reduction,
    Side,
    Source,
    TargetTensor,
    is_half_a_byte,
)
from elastic_ckpt.universal.plan import factored_dims, spans
from elastic_ckpt.universal.plan.spans import Form, Limits
from elastic_ckpt.universal.strides import row_major

# The most bytes of a layer of a region; a budget has room for hundreds.
_REGION_BYTES = 2**20
# The same of all layers of a region.
_LAYERS_BYTES = 2**26
_PLAIN = Arithmetic()
# Stacks share a few cuts. Each flat range has its own, which would fill memory.
_MOST_CUTS = 2**14
# With fewer pairs of boxes, all of them are tried.
_FEW_PAIRS = 256
_HALVES = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory that is filled by copies.

    Attributes:
      tensor: the target tensor.
      box: of it that the buffer holds; for a layer of a region, of its factored dims.
      dtype: of its elements.
      order: buffers of a lower number are filled first.
    """

    tensor: TargetTensor
    box: Box
    dtype: np.dtype
    order: int

    def __str__(self) -> str:
        return f"{self.tensor.name}{self.box}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Elements of a target that several sources are reduced to.

    Attributes:
      layers: the numbers of the buffers of its sources.
      move: that has these sources.
      box: of the factored dims of the move.
      halves: by source, the factored dim whose elements are two in a byte; None if they
        are whole bytes.
      buffer: the number of the buffer that gets the result.
      element: the place of the first element there.
      form: of the copy of the result to that buffer.
    """

    layers: tuple[int, ...]
    move: Move
    box: Box
    halves: tuple[int | None, ...]
    buffer: int
    element: int
    form: Form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilledPart:
    """Elements of a buffer that no source has.

    Attributes:
      buffer: its number.
      place: the elements in the buffer.
      value: of all of them.
    """

    buffer: int
    place: tuple[slice, ...]
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """All pieces of a host.

    Attributes:
      buffers: those that are filled.
      regions: of the sources that are reduced.
      fills: parts of buffers that no source has.
      files: the names of the files.
      forms: those of the copies.
      tensor: the stored tensor that a piece is read from, int64 `[n]`.
      file: the number of its file, int64 `[n]`.
      source: its first byte there, int64 `[n]`.
      form: the number of its form, int64 `[n]`.
      buffer: the number of its buffer, int64 `[n]`.
      element: the place of its first element there, int64 `[n]`.
    """

    buffers: Sequence[Buffer]
    regions: Sequence[Region]
    fills: Sequence[FilledPart]
    files: Sequence[str]
    forms: Sequence[Form]
    tensor: np.ndarray
    file: np.ndarray
    source: np.ndarray
    form: np.ndarray
    buffer: np.ndarray
    element: np.ndarray


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
      CheckpointError: if the fragments of a tensor leave out an element, or have one
        twice, sources that are reduced have different dtypes, or the moves and fills of
        a box do not add up to it.
    """
    return _Cutter(tensors, needed).cut(moves, fills)


class _Piece(NamedTuple):
    # A piece relative to the place of its fragment: `offset` in bytes. `form` is a
    # number.
    fragment: int
    offset: int
    form: int
    element: int


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
        # The elements of each buffer of a target that are not filled.
        self._left = [buffer.box.volume for buffer in self._buffers]
        self._regions: list[Region] = []
        self._fills: list[FilledPart] = []
        self._files: dict[str, int] = {}
        # The forms by number, and the elements of each.
        self._forms: dict[Form, int] = {}
        self._volumes: list[int] = []
        self._boxes_of_target = {
            tensor.name: tuple(of_tensor) for tensor, of_tensor in needed.items()
        }
        # The pieces of moves that were cut by a box.
        self._cuts: dict[Any, list[_Piece]] = {}
        # The number of the form of each kind of piece, and the strides of its buffer.
        self._kinds: dict[Any, tuple[int, tuple[int, ...]]] = {}
        # The number of each way in which tensors are cut into fragments, which overlap
        # nowhere: by these, and by tensor. The boxes of each.
        self._fragmentations: dict[Any, int] = {}
        self._fragmentation_of: dict[int, int] = {}
        self._held: list[Boxes] = []
        self._rows = array.array("q")

    def cut(self, moves: Iterable[Move], fills: Iterable[Fill]) -> Pieces:
        by_target: dict[str, list[Move]] = collections.defaultdict(list)
        for move in moves:
            if move.target in self._of_target and math.prod(move.sizes):
                by_target[move.target].append(move)
        for target, group in by_target.items():
            for move, positions in self._overlapping(group, target):
                is_half = is_half_a_byte(move.sources[0].viewed_as)
                if len(move.sources) == 1 and not is_half:
                    self._cut(move, positions)
                else:
                    self._reduce(move, positions)
        for fill in fills:
            self._fill(fill)
        self._check()
        rows = np.array(self._rows, np.int64).reshape(-1, 6).T
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
        )

    def _overlapping(
        self, moves: Sequence[Move], target: str
    ) -> Iterator[tuple[Move, Sequence[int]]]:
        # Each move, with the positions of the needed boxes that it may overlap.
        needed = self._boxes_of_target[target]
        if len(needed) == 1 or len(moves) * len(needed) <= _FEW_PAIRS:
            every = range(len(needed))
            yield from ((move, every) for move in moves)
            return
        rank = len(needed[0].start)
        bounds = [
            factored_dims.bounds(whole(each.sizes), each.target_side) for each in moves
        ]
        first, second = box_join.overlaps(
            Boxes.from_boxes(bounds, rank=rank), Boxes.from_boxes(needed, rank=rank)
        )
        ends = np.searchsorted(first, np.arange(len(moves) + 1)).tolist()
        positions = second.tolist()
        for number, move in enumerate(moves):
            yield move, positions[ends[number] : ends[number + 1]]

    def _cut(self, move: Move, positions: Sequence[int]) -> None:
        numbers, side = self._of_target[move.target], move.target_side
        extents = factored_dims.extents(move.sizes, side)
        for position in positions:
            number = numbers[position]
            box = self._buffers[number].box
            # Moves that differ in their tensors and places alone are cut in one way.
            inside = True
            for at, extent, low, high in zip(
                side.start, extents, box.start, box.stop, strict=True
            ):
                if at >= high or at + extent <= low:
                    break
                inside = inside and low <= at and at + extent <= high
            else:
                self._cut_by_box(move, number, side if not inside else None)

    def _cut_by_box(self, move: Move, number: int, placed: Side | None) -> None:
        (source,) = move.sources
        tensor, side = self._tensors[source.tensor], move.target_side
        box = self._buffers[number].box
        start = box.start if placed is None else side.start
        key = (
            move.sizes,
            (source.side.start, source.side.dims, source.side.steps),
            source.viewed_as,
            (start, side.dims, side.steps),
            move.arithmetic,
            (tensor.dtype, tensor.view),
            self._fragmentation(source.tensor),
            (box.start, box.stop),
        )
        pieces = self._cuts.get(key)
        if pieces is None:
            placed = Side(start=start, dims=side.dims, steps=side.steps)
            parts = [
                (number, part)
                for part in factored_dims.inside(whole(move.sizes), placed, box)
            ]
            pieces = [
                piece
                for _, piece in self._pieces(source, parts, placed, move.arithmetic)
            ]
            if len(self._cuts) < _MOST_CUTS:
                self._cuts[key] = pieces
        moved = 0
        if start is not side.start:
            strides = row_major(box.shape)
            moved = sum(
                (at - first) * stride
                for at, first, stride in zip(side.start, start, strides, strict=True)
            )
        for piece in pieces:
            self._left[number] -= self._volumes[piece.form]
            self._add(source.tensor, number, piece, moved)

    def _add(self, source: int, buffer: int, piece: _Piece, moved: int = 0) -> None:
        fragment = self._tensors[source].fragments[piece.fragment]
        file = self._files.setdefault(fragment.file, len(self._files))
        first = fragment.offset + piece.offset
        element = piece.element + moved
        self._rows.extend((source, file, first, piece.form, buffer, element))

    def _pieces(
        self,
        source: Source,
        parts: Sequence[tuple[int, Box]],
        side: Side,
        arithmetic: Arithmetic | None,
    ) -> Iterator[tuple[int, _Piece]]:
        # The pieces of parts of a source, each of which goes to one buffer.
        tensor = self._tensors[source.tensor]
        held = self._held[self._fragmentation(source.tensor)]
        volumes = [0] * len(parts)
        dtype = source.viewed_as or tensor.dtype
        if is_half_a_byte(source.viewed_as):
            dtype = _HALVES
        for at, number in self._fragments(source.side, parts, tensor, held):
            buffer, part = parts[at]
            box, fragment = self._buffers[buffer].box, tensor.fragments[number]
            for piece in factored_dims.inside(part, source.side, fragment.box):
                volumes[at] += piece.volume
                form, strides = self._kind(
                    (
                        piece.shape,
                        source.side.dims,
                        source.side.steps,
                        fragment.strides,
                        side.dims,
                        side.steps,
                        box.shape,
                        dtype,
                        arithmetic,
                        tensor.view,
                    )
                )
                yield (
                    buffer,
                    _Piece(
                        fragment=number,
                        offset=_element(
                            piece.start, source.side, fragment.box, fragment.strides
                        ),
                        form=form,
                        element=_element(piece.start, side, box, strides),
                    ),
                )
        for volume, (buffer, part) in zip(volumes, parts, strict=True):
            if volume != part.volume:
                raise self._misfit(tensor, volume, part.volume, self._buffers[buffer])

    def _fragments(
        self,
        side: Side,
        parts: Sequence[tuple[int, Box]],
        tensor: StoredTensor,
        held: Boxes,
    ) -> Iterator[tuple[int, int]]:
        # The pairs of parts and fragments that may overlap, by number.
        if len(parts) * len(tensor.fragments) <= _FEW_PAIRS:
            yield from itertools.product(
                range(len(parts)), range(len(tensor.fragments))
            )
            return
        rank = len(tensor.shape)
        bounds = [factored_dims.bounds(part, side) for _, part in parts]
        first, second = box_join.overlaps(Boxes.from_boxes(bounds, rank=rank), held)
        yield from zip(first.tolist(), second.tolist(), strict=True)

    def _fragmentation(self, source: int) -> int:
        # The number of the way in which a tensor is cut into fragments.
        number = self._fragmentation_of.get(source)
        if number is None:
            tensor = self._tensors[source]
            key = (
                len(tensor.shape),
                *(
                    (each.box.start, each.box.stop, each.strides)
                    for each in tensor.fragments
                ),
            )
            number = self._fragmentations.setdefault(key, len(self._held))
            self._fragmentation_of[source] = number
            if number == len(self._held):
                held = [fragment.box for fragment in tensor.fragments]
                self._held.append(Boxes.from_boxes(held, rank=len(tensor.shape)))
                self._check_apart(tensor, self._held[-1])
        return number

    def _check_apart(self, tensor: StoredTensor, held: Boxes) -> None:
        if len(held) < 2:
            return
        if len(box_join.overlaps(held, held)[0]) > np.count_nonzero(held.volumes):
            raise errors.CheckpointError(
                f"{tensor.name} {dict(tensor.ranks) or ''}: the files hold some of its"
                " elements twice; the checkpoint is damaged, use another step"
            )

    def _misfit(
        self, tensor: StoredTensor, held: int, needed: int, buffer: Buffer
    ) -> errors.CheckpointError:
        return errors.CheckpointError(
            f"{tensor.name} {dict(tensor.ranks) or ''}: the files hold {held} of"
            f" {needed} elements that {buffer} needs; the checkpoint is damaged, use"
            " another step"
        )

    def _kind(self, kind: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
        found = self._kinds.get(kind)
        if found is None:
            sizes, dims, steps, strides, to_dims, to_steps, shape, *rest = kind
            dtype, done, view = rest
            arithmetic = done or _PLAIN
            into = row_major(shape)
            form = spans.normalized(
                Form(
                    sizes=sizes,
                    source_strides=_advances(dims, steps, strides),
                    buffer_strides=_advances(to_dims, to_steps, into),
                    dtype=dtype,
                    scale=arithmetic.scale,
                    shift=arithmetic.shift,
                    view=view,
                )
            )
            number = self._forms.setdefault(form, len(self._forms))
            if number == len(self._volumes):
                self._volumes.append(form.volume)
            found = self._kinds[kind] = number, into
        return found

    def _reduce(self, move: Move, positions: Sequence[int]) -> None:
        self._check_dtypes(move)
        packed = [self._packed(source) for source in move.sources]
        source, _ = packed[0]
        tensor = self._tensors[source.tensor]
        tensor_strides = row_major(tensor.shape, tensor.dtype.itemsize)
        strides = _advances(source.side.dims, source.side.steps, tensor_strides)
        region_bytes = min(_REGION_BYTES, _LAYERS_BYTES // len(packed))
        limits = Limits(
            gap_bytes=2**62, span_bytes=max(tensor.dtype.itemsize, region_bytes)
        )
        # Factors that a region has whole: those of products of matrices, and of bytes.
        kept = {factor for factor, dim in enumerate(move.target_side.dims) if dim < 0}
        kept |= {factor for _, factor in packed if factor is not None}
        every = whole(move.sizes)
        numbers = self._of_target[move.target]
        listed: list[list[tuple[int, Box]]] = [[] for _ in packed]
        for position in positions:
            number = numbers[position]
            box = self._buffers[number].box
            for part in factored_dims.inside(every, move.target_side, box):
                lengths = list(
                    spans.block(part.shape, strides, tensor.dtype.itemsize, limits)
                )
                for factor in kept:
                    lengths[factor] = part.shape[factor]
                for region in _grid(part, lengths, strides):
                    layers = self._add_region(move, packed, region, number)
                    for of_source, layer in zip(listed, layers, strict=True):
                        of_source.append((layer, self._buffers[layer].box))
        # A layer has the factored dims themselves as its dims.
        factors = range(len(move.sizes))
        side = Side(
            start=(0,) * len(factors), dims=tuple(factors), steps=(1,) * len(factors)
        )
        for (each, _), parts in zip(packed, listed, strict=True):
            for layer, piece in self._pieces(each, parts, side, None):
                self._add(each.tensor, layer, piece)

    def _check_dtypes(self, move: Move) -> None:
        arithmetic = move.arithmetic or _PLAIN
        if arithmetic.reduction in (Reduction.PRODUCT, Reduction.LOW_RANK):
            return
        tensor = self._tensors[move.source]
        for each in move.sources:
            other = self._tensors[each.tensor]
            if other.dtype != tensor.dtype:
                raise errors.CheckpointError(
                    f"{tensor.name} {dict(tensor.ranks)} is {tensor.dtype.name}, and"
                    f" {other.name} {dict(other.ranks)} is {other.dtype.name}, but"
                    f" both are sources of {move.target}; use another step, or read one"
                    " of them (`unchecked`)"
                )

    def _packed(self, source: Source) -> tuple[Source, int | None]:
        # A source whose last dim has bytes of two elements, in numbers of bytes, and
        # the factor that is half as long.
        if not is_half_a_byte(source.viewed_as):
            return source, None
        tensor = self._tensors[source.tensor]
        last = len(tensor.shape) - 1
        start, steps, factor = list(source.side.start), [], None
        for number, (dim, step) in enumerate(
            zip(source.side.dims, source.side.steps, strict=True)
        ):
            if dim == last and step == 1:
                factor = number
            steps.append(max(1, step // 2) if dim == last else step)
        if factor is None or start[last] % 2:
            raise errors.CheckpointError(
                f"{tensor.name}: elements of half a byte can only be read along its"
                " last dim, from an even one on; change the dims of the rule"
            )
        start[last] //= 2
        side = Side(start=tuple(start), dims=source.side.dims, steps=tuple(steps))
        return dataclasses.replace(source, side=side), factor

    def _add_region(
        self,
        move: Move,
        packed: Sequence[tuple[Source, int | None]],
        region: Box,
        number: int,
    ) -> list[int]:
        # The numbers of the layers of a region, which are filled later.
        buffer = self._buffers[number]
        order = buffer.order + 1 + len(self._regions)
        layers = []
        for source, half in packed:
            start, stop = list(region.start), list(region.stop)
            for factor, dim in enumerate(source.side.dims):
                if dim < 0:
                    start[factor], stop[factor] = 0, 1
            tensor = self._tensors[source.tensor]
            dtype = source.viewed_as or tensor.dtype
            if half is not None:
                dtype = _HALVES
                start[half], stop[half] = start[half] // 2, -(-stop[half] // 2)
            layers.append(len(self._buffers))
            self._buffers.append(
                Buffer(
                    tensor=buffer.tensor,
                    box=Box(start=tuple(start), stop=tuple(stop)),
                    dtype=dtype,
                    order=order,
                )
            )
        side = move.target_side
        shape = tuple(
            1 if dim < 0 else length
            for dim, length in zip(side.dims, region.shape, strict=True)
        )
        strides = row_major(buffer.box.shape)
        dtype = move.sources[0].viewed_as or self._tensors[move.source].dtype
        self._left[number] -= math.prod(shape)
        self._regions.append(
            Region(
                layers=tuple(layers),
                move=move,
                box=region,
                halves=tuple(half for _, half in packed),
                buffer=number,
                element=_element(region.start, side, buffer.box, strides),
                form=Form(
                    sizes=shape,
                    source_strides=row_major(shape, dtype.itemsize),
                    buffer_strides=_advances(side.dims, side.steps, strides),
                    dtype=dtype,
                ),
            )
        )
        return layers

    def _fill(self, fill: Fill) -> None:
        box = Box(start=fill.start, stop=fill.stop)
        for number in self._of_target.get(fill.target, ()):
            buffer = self._buffers[number]
            part = boxes.intersect(box, buffer.box)
            if part is None:
                continue
            self._left[number] -= part.volume
            self._fills.append(
                FilledPart(
                    buffer=number,
                    place=boxes.relative(part, buffer.box),
                    value=fill.value,
                )
            )

    def _check(self) -> None:
        for number, left in enumerate(self._left):
            if left:
                buffer = self._buffers[number]
                sources = errors.first_of(self._sources(number))
                problem = f"{-left} of its elements are filled twice"
                if left > 0:
                    problem = f"nothing fills {left} of its elements"
                raise errors.CheckpointError(
                    f"{buffer}: {problem} (sources: {sources or 'none'}); correct the"
                    " rules of the layout that name it"
                )

    def _sources(self, number: int) -> Iterator[str]:
        rows = np.array(self._rows, np.int64).reshape(-1, 6)
        layers = [
            layer for r in self._regions if r.buffer == number for layer in r.layers
        ]
        chosen = rows[np.isin(rows[:, 4], [number, *layers]), 0]
        return (self._tensors[each].name for each in dict.fromkeys(chosen.tolist()))


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
