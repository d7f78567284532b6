"""A parameter is cut along one dim into parts, which lie in the shards of ranks.

All of DeepSpeed's ways to cut one become such parts: equal and unequal shards, halves,
joined parameters, and affine maps. Consecutive parts of ascending ranks become one name
of a rule, sharded by given widths:

    "(s0@tp + s1@tp) d1"  ->  "(s0 + s1) d1"      widths: {s0: {tp: [6, 6]}, ...}

What several ranks hold is taken from the first of them. The others' copies are names
that the target lacks, as is the padding of a vocabulary.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.strides import row_major

AXIS = "tp"
# A map of blocks that overlap each other is cut into many.
_MOST_CUTS = 100_000

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Consecutive indices of a parameter, along the dim that is cut.

    Attributes:
      rank: that has them.
      at: the first of them in the shard of the rank.
      start: the first of them in the parameter.
      length: their number.
      is_left_out: whether the parameter lacks them, or has them from another rank.
    """

    rank: int
    at: int
    start: int
    length: int
    is_left_out: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The dims of the shards and of the whole parameter, as a rule has them.

    Attributes:
      source: the dims expression of a shard.
      target: that of the parameter.
      widths: of sharded names on each rank.
      sizes: of other names.
      pad: the names that the target lacks.
      reduced: `replicated`, `mean`, or "" if all ranks have different elements.
      scale: the values of shards, over those of the parameter.
    """

    source: str = ""
    target: str = ""
    widths: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    pad: tuple[str, ...] = ()
    reduced: str = ""
    scale: float = 1.0


def whole(shapes: Sequence[Shape], reduced: str, rows: int | None = None) -> Geometry:
    """The geometry of a parameter of which each rank has all.

    Args:
      shapes: of each rank's parameter, which have to be equal.
      reduced: see `Geometry`.
      rows: that are kept of the first dim; None for all.
    """
    if len(set(shapes)) > 1:
        raise FormatError(
            f"ranks have the shapes {sorted(set(shapes))}, and should be equal"
        )
    (shape,) = set(shapes)
    made = joined([shape], 0, [shape[:1]], rows) if shape else Geometry()
    return dataclasses.replace(made, reduced=reduced if len(shapes) > 1 else "")


def joined(
    shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]], rows: int | None
) -> Geometry:
    """The geometry of parameters that are joined along a dim, then cut along it.

    Args:
      shapes: of each rank's shard.
      dim: along which they are cut.
      widths: of each joined parameter, in their order: what each rank has of it.
      rows: that are kept of this dim; None for all.

    Raises:
      FormatError: if the shards have no such dim or other widths.
    """
    for shape in shapes:
        if len(shape) <= dim:
            raise FormatError(f"it has no dim {dim}: its shape is {list(shape)}")
    ends = [0] * len(shapes)
    parts, start = [], 0
    for each in widths:
        for rank, width in enumerate(each):
            parts.append(Part(rank, ends[rank], start, width))
            start += width
            ends[rank] += width
    return _cut(shapes, dim, start, parts, rows)


def mapped(shapes: Sequence[Shape], entry: Any, rows: int | None) -> Geometry:
    """The geometry that an affine map describes.

    A map lists blocks: each is a strided view of the whole parameter and of a shard, as
    `torch.as_strided` has it, with a scale. Maps that DeepSpeed makes cut a parameter
    along one dim.

    Spec: deepspeed/checkpoint/affine_ir_spec.md in DeepSpeed's repository

    Args:
      shapes: of each rank's shard.
      entry: the map, of dicts and lists.
      rows: that are kept of the first dim; None for all.

    Raises:
      FormatError: if the map is malformed, does not fit the shards, or cuts several
        dims.
    """
    # The rank and the shape of each block, and where it begins in the parameter and in
    # the shard.
    blocks: list[tuple[int, Shape, Shape, Shape]] = []
    scales, cut = set(), set()
    try:
        logical = _sizes(entry["logical_shape"])
        ranks = [entry["ranks"][str(rank)] for rank in range(len(entry["ranks"]))]
        stated = [_sizes(each["shard_shape"]) for each in ranks]
        if stated != list(shapes):
            raise FormatError(
                f"ranks have shards of the shapes {shapes}, and {stated} are stated"
            )
        for rank, each in enumerate(ranks):
            cut |= _differing(shapes[rank], logical)
            for piece in each["pieces"]:
                shape = _sizes(piece["shape"])
                if math.prod(shape):
                    start = _begin(piece["source"], shape, logical)
                    at = _begin(piece["dest"], shape, shapes[rank])
                    blocks.append((rank, shape, start, at))
                    cut |= _differing(shape, logical)
                    scales.add(float(piece.get("scale", 1.0)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the affine map is malformed ({error!r})") from None
    if len(scales) > 1 or not all(math.isfinite(each) and each for each in scales):
        raise FormatError(f"the blocks have the scales {sorted(scales)}, not one")
    if len(cut) > 1:
        raise FormatError(f"the affine map cuts the dims {sorted(cut)}, not one")
    if not cut and [rank for rank, *_ in blocks] == list(range(len(shapes))):
        made = whole(shapes, "replicated", rows)
    else:
        dim = cut.pop() if cut else 0
        parts = [
            Part(r, at[dim], start[dim], shape[dim]) for r, shape, start, at in blocks
        ]
        made = _cut(shapes, dim, logical[dim], parts, rows)
    return dataclasses.replace(made, scale=scales.pop() if scales else 1.0)


def _differing(shape: Shape, logical: Shape) -> set[int]:
    # The dims in which a block or shard is shorter than its parameter.
    pairs = enumerate(zip(shape, logical, strict=True))
    return {dim for dim, (length, whole_length) in pairs if length != whole_length}


def _sizes(values: Any) -> Shape:
    if not all(type(each) is int and 0 <= each < 2**62 for each in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


def _begin(place: Any, shape: Shape, array: Shape) -> Shape:
    # The index in a row-major array of the first element of a block.
    strides = row_major(array, 1)
    for length, stride, stated in zip(shape, strides, place[1], strict=True):
        if length > 1 and stride != stated:
            raise ValueError("a block is no box of its tensor")
    (offset,) = _sizes(place[:1])
    index = np.unravel_index(offset, array)
    if any(
        n + length > size for n, length, size in zip(index, shape, array, strict=True)
    ):
        raise ValueError("a block lies outside of its tensor")
    return tuple(map(int, index))


def _cut(
    shapes: Sequence[Shape],
    dim: int,
    length: int,
    parts: Sequence[Part],
    rows: int | None,
) -> Geometry:
    # Of a parameter of `length` along the dim that is cut.
    if rows is not None and dim:
        raise FormatError(f"a vocabulary is cut along the dim {dim}, not 0")
    pieces = list(_disjoint(parts, length, length if rows is None else rows))
    of_ranks = sorted(pieces, key=lambda each: (each.rank, each.at))
    ends = [0] * len(shapes)
    for piece in of_ranks:
        if piece.at != ends[piece.rank]:
            raise FormatError(
                f"rank {piece.rank} has a part at {piece.at}, and the one before it"
                f" ends at {ends[piece.rank]}"
            )
        ends[piece.rank] += piece.length
    if ends != [shape[dim] for shape in shapes]:
        raise FormatError(
            f"ranks have shards of the shapes {shapes}, and parts of {ends} along the"
            f" dim {dim}"
        )
    # In the order of the shards; if ranks have different orders, each piece alone.
    groups = sorted(_groups(pieces), key=lambda group: max(each.at for each in group))
    listed = [piece for group in groups for piece in group]
    if sorted(listed, key=lambda each: each.rank) != of_ranks:
        groups = [[piece] for piece in of_ranks]
    if not groups:
        groups = [[Part(rank, 0, 0, 0) for rank in range(len(shapes))]]
    names, widths, kept = [], [], {}
    for number, group in enumerate(groups):
        names.append(f"{'x' if group[0].is_left_out else 's'}{number}")
        lengths = {each.rank: each.length for each in group}
        widths.append(tuple(lengths.get(rank, 0) for rank in range(len(shapes))))
        if not group[0].is_left_out:
            kept[group[0].start] = names[-1]
    is_sharded = len(shapes) > 1
    suffix = f"@{AXIS}" if is_sharded else ""
    dims = [f"d{number}" for number in range(len(shapes[0]))]
    source, target = (
        " ".join([*dims[:dim], f"({' + '.join(each)})", *dims[dim + 1 :]])
        for each in ([n + suffix for n in names], [kept[at] for at in sorted(kept)])
    )
    return Geometry(
        source,
        target,
        widths=tuple(zip(names, widths, strict=True)) if is_sharded else (),
        sizes=() if is_sharded else tuple(zip(names, map(sum, widths), strict=True)),
        pad=tuple(name for name in names if name.startswith("x")),
    )


def _disjoint(parts: Sequence[Part], length: int, kept: int) -> Iterator[Part]:
    # Parts that overlap are cut where any of them begins or ends, and where the
    # parameter ends, if it is padded.
    cuts = {0, length, min(kept, length)}
    cuts.update(*((each.start, each.start + each.length) for each in parts))
    bounds = sorted(cuts)
    holders: list[dict[int, Part]] = [{} for _ in bounds[1:]]
    count = 0
    for part in parts:
        first = bisect.bisect_left(bounds, part.start)
        stop = bisect.bisect_left(bounds, part.start + part.length)
        count += stop - first
        if count > _MOST_CUTS:
            raise FormatError("the blocks of the affine map overlap too often")
        for number in range(first, stop):
            if holders[number].setdefault(part.rank, part) is not part:
                raise FormatError(f"rank {part.rank} has {bounds[number]} twice")
    for (start, stop), held in zip(itertools.pairwise(bounds), holders, strict=True):
        if not held:
            raise FormatError(f"no rank has {start} and what follows, along its dim")
        first = min(held)
        for rank, part in sorted(held.items()):
            is_left_out = start >= kept or rank != first
            at = part.at + start - part.start
            yield Part(rank, at, start, stop - start, is_left_out)


def _groups(pieces: Sequence[Part]) -> list[list[Part]]:
    # Pieces of one name: those of ascending ranks, at most one of each.
    groups: list[list[Part]] = []
    for piece in sorted(pieces, key=lambda each: each.is_left_out):
        last = groups[-1][-1] if groups else piece
        if last.rank < piece.rank and last.is_left_out == piece.is_left_out:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups
