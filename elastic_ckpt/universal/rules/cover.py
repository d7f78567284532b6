"""Proves that copies have each element of a tensor exactly once, or names the others.

The copies of a part are boxes in its factors. They have each element once if there are
no gaps and their volumes add up to that of the part.
"""

from __future__ import annotations

import numpy as np

from elastic_ckpt.core import box_cover, boxes
from elastic_ckpt.universal.rules.copies import Part


def missing(part: Part) -> str | None:
    """A description of the elements of a target's part that no copy has.

    Returns:
      `tensor (layer 3:4, expert 0:8)`; None if there are none.
    """
    lengths = [part.piece.ranges[name].length for name in part.names]
    if len(part.starts) == 1 and part.volume == part.piece.volume:
        return None
    chosen = _cut_dims(part, lengths)
    gaps = box_cover.gaps([lengths[dim] for dim in chosen], _boxes(part, chosen))
    if not len(gaps):
        return None
    return f"{part.placed.row.name} ({_text(part, chosen, gaps[0])})"


def repeated(part: Part) -> str | None:
    """A description of a target's part if copies have more elements than it has."""
    volume = part.piece.volume
    if part.volume <= volume:
        return None
    return f"{part.placed.row.name} ({part.volume} for {volume} elements)"


def unused(part: Part) -> str | None:
    """A description of a source's part if copies do not have all of its elements."""
    if part.volume >= part.piece.volume:
        return None
    return (
        f"{part.placed.row.name} ({part.piece.volume - part.volume} of "
        f"{part.piece.volume} elements)"
    )


def _cut_dims(part: Part, lengths: list[int]) -> list[int]:
    # The factors that some copy does not have whole.
    if not part.starts:
        return list(range(len(lengths)))
    sides = np.array(part.stops, np.int64) - np.array(part.starts, np.int64)
    sides = sides.reshape(len(part.starts), len(lengths))
    cut = (sides != np.array(lengths, np.int64)).any(axis=0)
    return np.flatnonzero(cut).tolist()


def _boxes(part: Part, chosen: list[int]) -> boxes.Boxes:
    shape = (len(part.starts), len(part.names))
    first = np.array(
        [part.piece.ranges[name].start for name in part.names], np.int64
    ).reshape(1, -1)
    start = np.array(part.starts, np.int64).reshape(shape) - first
    stop = np.array(part.stops, np.int64).reshape(shape) - first
    return boxes.Boxes(start=start[:, chosen], stop=stop[:, chosen])


def _text(part: Part, chosen: list[int], box: boxes.Box) -> str:
    parts = []
    for dim, start, stop in zip(chosen, box.start, box.stop, strict=True):
        first = part.piece.ranges[part.names[dim]].start
        parts.append(f"{part.names[dim]} {start + first}:{stop + first}")
    return ", ".join(parts) or "all"
