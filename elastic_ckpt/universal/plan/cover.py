"""Proves that every element of the buffers of a host is filled exactly once.

The volumes of the pieces of a buffer have to add up to its own, and no two pieces may
overlap; then none of its elements is left out. The elements that a piece fills are a
product of sets of indices, one for each dim. Mostly these are intervals, and the piece
is a box. Others are made boxes: indices that belong to the same sets become one, an
atom.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, errors
from elastic_ckpt.core.boxes import Boxes

# An error names an element of a buffer whose dims have so many indices at most: all
# indices are listed to find it.
_MOST_INDICES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """The elements that a piece fills, relative to the first of them.

    Attributes:
      sizes: of its factored dims.
      dims: the dim of the buffer that each advances along.
      steps: by how many elements.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def from_factors(
        cls, sizes: Sequence[int], dims: Sequence[int], steps: Sequence[int]
    ) -> Image:
        """The image of a box of factored dims; those of length 1 are left out."""
        kept = [factor for factor, size in enumerate(sizes) if size > 1]
        return cls(
            sizes=tuple(sizes[factor] for factor in kept),
            dims=tuple(dims[factor] for factor in kept),
            steps=tuple(steps[factor] for factor in kept),
        )

    @functools.cached_property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def indices(self, dim: int) -> np.ndarray:
        """The indices along a dim, ascending, relative to the first."""
        offsets = np.zeros(1, np.int64)
        for size, of_dim, step in zip(self.sizes, self.dims, self.steps, strict=True):
            if of_dim == dim:
                offsets = np.add.outer(offsets, np.arange(size) * step).ravel()
        return np.sort(offsets)

    @functools.cached_property
    def distinct(self) -> bool:
        """Whether no element is filled twice."""
        # Mostly the steps show it; a dim may have more indices than memory has room.
        return all(
            self._ascends(dim) or bool((np.diff(self.indices(dim)) > 0).all())
            for dim in set(self.dims)
        )

    def lengths(self, rank: int) -> list[int] | None:
        """The lengths of the box that the elements are, by dim; None if they are none.

        Args:
          rank: the number of dims.
        """
        lengths = []
        for dim in range(rank):
            length = 1
            # Sums of multiples are an interval only if each step is the length of the
            # interval below it.
            for step, size in self._factors(dim):
                if step != length:
                    return None
                length *= size
            lengths.append(length)
        return lengths

    def _factors(self, dim: int) -> list[tuple[int, int]]:
        # The steps and sizes along a dim, ascending.
        factors = zip(self.steps, self.sizes, self.dims, strict=True)
        return sorted((step, size) for step, size, of_dim in factors if of_dim == dim)

    def _ascends(self, dim: int) -> bool:
        # Whether each step is beyond all indices of the steps below it.
        last = 0
        for step, size in self._factors(dim):
            if step <= last:
                return False
            last += step * (size - 1)
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """The n pieces that fill buffers.

    Attributes:
      buffer: the number of each piece's buffer, int64 `[n]`.
      element: its first element there, in row-major order, int64 `[n]`.
      image: the number of its image, int64 `[n]`.
      tensor: the number of the stored tensor that it is from, -1 if there is none.
      images: by number.
    """

    buffer: np.ndarray
    element: np.ndarray
    image: np.ndarray
    tensor: np.ndarray
    images: tuple[Image, ...]


def check(
    placed: Placed,
    shapes: Sequence[tuple[int, ...]],
    buffers: Sequence[object],
    tensors: Sequence[object],
) -> None:
    """Proves that the pieces fill each element of each buffer exactly once.

    Args:
      placed: the pieces, inside of their buffers.
      shapes: of the buffers.
      buffers: their names, for the error.
      tensors: the names of the stored tensors, for the error.

    Raises:
      CheckpointError: if an element is left out, or filled twice.
    """
    volumes = np.array([image.volume for image in placed.images], np.int64)
    needed = np.array([math.prod(shape) for shape in shapes], np.int64)
    order = np.argsort(placed.buffer, kind="stable")
    ordered = placed.buffer[order]
    bounds = np.searchsorted(ordered, np.arange(len(shapes) + 1))
    sums = np.concatenate([[0], np.cumsum(volumes[placed.image[order]])])
    wrong = sums[bounds[1:]] - sums[bounds[:-1]] != needed
    distinct = np.array([image.distinct for image in placed.images], bool)
    wrong[placed.buffer[~distinct[placed.image]]] = True
    # A single piece of the volume of its buffer is all of it.
    several = order[(np.diff(bounds) > 1)[ordered]]
    held = _boxes(placed, several, shapes)
    first, second = box_join.overlaps(held, held)
    wrong[held.start[first[first != second], 0]] = True
    for number in np.flatnonzero(wrong).tolist():
        rows = order[bounds[number] : bounds[number + 1]]
        _fail(placed, rows, shapes[number], buffers[number], tensors)


def _boxes(
    placed: Placed, rows: np.ndarray, shapes: Sequence[tuple[int, ...]]
) -> Boxes:
    # The boxes that pieces fill, with the number of the buffer as the first dim. Where
    # a buffer has pieces that are no boxes, indices are those of its atoms.
    rank = max(map(len, shapes), default=0)
    lengths = np.full((len(placed.images), rank), -1, np.int64)
    for image in np.unique(placed.image[rows]).tolist():
        of_image = placed.images[image].lengths(rank)
        if of_image is not None:
            lengths[image] = of_image
    buffer, side = placed.buffer[rows], lengths[placed.image[rows]]
    scattered = np.unique(buffer[(side < 0).any(axis=1)])
    dense = ~np.isin(buffer, scattered)
    padded = np.ones((len(shapes), rank), np.int64)
    for number, shape in enumerate(shapes):
        padded[number, : len(shape)] = shape
    start = _coordinates(placed.element[rows[dense]], padded[buffer[dense]])
    starts = [np.column_stack([buffer[dense], start])]
    stops = [np.column_stack([buffer[dense] + 1, start + side[dense]])]
    for number in scattered.tolist():
        _, cells = _in_atoms(placed, rows[buffer == number], shapes[number])
        start = np.zeros((len(cells), 1 + rank), np.int64)
        stop = np.ones((len(cells), 1 + rank), np.int64)
        start[:, 0], stop[:, 0] = number, number + 1
        start[:, 1 : 1 + cells.rank], stop[:, 1 : 1 + cells.rank] = (
            cells.start,
            cells.stop,
        )
        starts.append(start)
        stops.append(stop)
    return Boxes(start=np.concatenate(starts), stop=np.concatenate(stops))


def _fail(
    placed: Placed,
    rows: np.ndarray,
    shape: tuple[int, ...],
    buffer: object,
    tensors: Sequence[object],
) -> None:
    problem = "some of its elements are filled twice, or not at all"
    if max(shape, default=0) <= _MOST_INDICES:
        atoms, cells = _in_atoms(placed, rows, shape)
        gaps = box_cover.gaps([len(of_dim) for of_dim in atoms], cells)
        problem = "some of its elements are filled twice"
        if len(gaps):
            numbers = zip(atoms, gaps.start[0].tolist(), strict=True)
            index = [int(of_dim[number]) for of_dim, number in numbers]
            problem = f"nothing fills its element {index}"
    numbers = dict.fromkeys(placed.tensor[rows].tolist())
    sources = errors.first_of(str(tensors[each]) for each in numbers if each >= 0)
    raise errors.CheckpointError(
        f"{buffer}: {problem} (sources: {sources or 'none'}); correct the rules of the"
        " layout that name it"
    )


def _coordinates(elements: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    # The index of each element in an array of its shape, in row-major order.
    index = np.empty(shapes.shape, np.int64)
    rest = elements
    for dim in reversed(range(shapes.shape[1])):
        size = np.maximum(1, shapes[:, dim])
        index[:, dim], rest = rest % size, rest // size
    return index


def _in_atoms(
    placed: Placed, rows: np.ndarray, shape: tuple[int, ...]
) -> tuple[list[np.ndarray], Boxes]:
    # The atoms of a buffer, by dim the first index of each, and its pieces as boxes of
    # atoms. An atom is the indices that belong to the same sets.
    shapes = np.tile(np.array(shape, np.int64), (len(rows), 1))
    starts = _coordinates(placed.element[rows], shapes)
    images = [placed.images[number] for number in placed.image[rows].tolist()]
    atoms: list[np.ndarray] = []
    runs: list[list[list[tuple[int, int]]]] = []
    for dim, size in enumerate(shape):
        sets = [
            start + image.indices(dim)
            for start, image in zip(starts[:, dim].tolist(), images, strict=True)
        ]
        atom = _atoms(size, sets)
        atoms.append(np.unique(atom, return_index=True)[1])
        runs.append([_runs(np.unique(atom[each])) for each in sets])
    cells = [
        boxes.Box(
            start=tuple(start for start, _ in chosen),
            stop=tuple(stop for _, stop in chosen),
        )
        for number in range(len(images))
        for chosen in itertools.product(*(of_dim[number] for of_dim in runs))
    ]
    return atoms, Boxes.from_boxes(cells, rank=len(shape))


def _atoms(size: int, sets: Sequence[np.ndarray]) -> np.ndarray:
    # The number of each index's atom.
    atom = np.zeros(size, np.int64)
    bounds = []
    for chosen in {each.tobytes(): each for each in sets}.values():
        if chosen[-1] - chosen[0] + 1 == len(chosen):
            bounds += [chosen[0], chosen[-1] + 1]
            continue
        member = np.zeros(size, np.int64)
        member[chosen] = 1
        atom = np.unique(atom * 2 + member, return_inverse=True)[1]
    interval = np.searchsorted(np.unique(bounds), np.arange(size), side="right")
    return np.unique(atom * (len(bounds) + 1) + interval, return_inverse=True)[1]


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    # Consecutive numbers as (first, after the last).
    ends = np.flatnonzero(np.diff(numbers) != 1)
    firsts = [0, *(ends + 1).tolist()]
    lasts = [*ends.tolist(), len(numbers) - 1]
    return [
        (int(numbers[first]), int(numbers[last]) + 1)
        for first, last in zip(firsts, lasts, strict=True)
    ]
