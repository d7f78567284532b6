"""Finds the elements of a box that no other box covers; the others may overlap.

The distinct bounds of the boxes divide the array into cells. Each cell is covered
entirely or not at all; a prefix sum over the corners of the boxes counts the boxes that
cover each cell (coordinate compression with a difference array). A regular grid of n
boxes has n cells. Irregular boxes have up to n**r cells. If there are too many cells,
the array is halved, which leaves each half with fewer bounds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from elastic_ckpt.core import boxes

_MAX_CELLS = 2**21


def gaps(region: boxes.Box, held: boxes.Boxes) -> boxes.Boxes:
    """The elements of `region` that no box in `held` covers.

    Returns:
      Disjoint, non-empty boxes in a fixed order.
    """
    parts = _gaps(region, _inside(region, held)) if region.volume else []
    if not parts:
        return boxes.Boxes.from_boxes([], rank=len(region.start))
    start = np.concatenate([part.start for part in parts])
    stop = np.concatenate([part.stop for part in parts])
    return boxes.Boxes(start=start, stop=stop)


def tiled(shapes: np.ndarray, array: np.ndarray, held: boxes.Boxes) -> np.ndarray:
    """For each array, whether its boxes form a complete regular grid.

    If they do, the array has no gaps or overlaps; otherwise, it may have gaps. The test
    is fast because it handles many arrays at a time.

    Args:
      shapes: the shape of each array, int64 `[a, r]`.
      array: the index of each box's array, int `[n]`.
      held: the boxes; no duplicates.

    Returns:
      A bool for each array, `[a]`.
    """
    sides = held.stop - held.start
    tile = np.ones_like(shapes)
    np.maximum.at(tile, array, sides)
    step = tile[array]
    fits = held.start % step == 0
    fits &= held.stop == np.minimum(held.start + step, shapes[array])
    fits &= sides > 0
    misfits = np.bincount(array[~fits.all(axis=1)], minlength=len(shapes))
    tiles = np.prod(-(-shapes // tile), axis=1)
    return (misfits == 0) & (np.bincount(array, minlength=len(shapes)) == tiles)


def _gaps(region: boxes.Box, held: boxes.Boxes) -> list[boxes.Boxes]:
    if bool((held.volumes == region.volume).any()):
        return []
    # The bounds of the cells in each dim, in ascending order.
    cuts = [
        np.unique(np.concatenate([held.start[:, dim], held.stop[:, dim], ends]))
        for dim, ends in enumerate(zip(region.start, region.stop, strict=True))
    ]
    numbers = [len(bounds) - 1 for bounds in cuts]
    if math.prod(numbers) <= max(_MAX_CELLS, 2 ** len(cuts) * len(held)):
        return [_bare(cuts, _covering(cuts, held) == 0)]
    dim = int(np.argmax(numbers))
    middle = int(cuts[dim][len(cuts[dim]) // 2])
    halves = (
        boxes.Box(start=region.start, stop=_put(region.stop, dim, middle)),
        boxes.Box(start=_put(region.start, dim, middle), stop=region.stop),
    )
    return [part for half in halves for part in _gaps(half, _inside(half, held))]


def _inside(region: boxes.Box, held: boxes.Boxes) -> boxes.Boxes:
    start = np.maximum(held.start, np.array(region.start, np.int64))
    stop = np.minimum(held.stop, np.array(region.stop, np.int64))
    overlap = (start < stop).all(axis=1)
    return boxes.Boxes(start=start[overlap], stop=stop[overlap])


def _covering(cuts: list[np.ndarray], held: boxes.Boxes) -> np.ndarray:
    # The number of boxes over each cell: +1 and -1 at the corners of each box, summed.
    rank = len(cuts)
    sizes = tuple(len(bounds) for bounds in cuts)
    sides = [
        [np.searchsorted(bounds, side[:, dim]) for side in (held.start, held.stop)]
        for dim, bounds in enumerate(cuts)
    ]
    counts = np.zeros(math.prod(sizes), np.int32)
    for corner in itertools.product((0, 1), repeat=rank):
        flat = np.zeros(len(held), np.int64)
        for dim, side in enumerate(corner):
            flat = flat * sizes[dim] + sides[dim][side]
        at = np.bincount(flat, minlength=counts.size)
        counts += ((-1) ** sum(corner) * at).astype(np.int32)
    grid = counts.reshape(sizes)
    for dim in range(rank):
        np.cumsum(grid, axis=dim, out=grid)
    # No cell starts at the last bound of a dim.
    return grid[tuple(slice(size - 1) for size in sizes)]


def _bare(cuts: list[np.ndarray], bare: np.ndarray) -> boxes.Boxes:
    # Adjacent cells along the last dim become one box.
    if not cuts:
        return boxes.Boxes.from_boxes(int(bare.sum()) * [boxes.whole(())], rank=0)
    ended = np.zeros((*bare.shape[:-1], 1), bool)
    before = np.concatenate([ended, bare[..., :-1]], axis=-1)
    after = np.concatenate([bare[..., 1:], ended], axis=-1)
    first, last = np.nonzero(bare & ~before), np.nonzero(bare & ~after)
    start = np.stack([bounds[at] for bounds, at in zip(cuts, first, strict=True)], 1)
    stop = np.stack([bounds[at + 1] for bounds, at in zip(cuts, last, strict=True)], 1)
    return boxes.Boxes(start=start, stop=stop)


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
