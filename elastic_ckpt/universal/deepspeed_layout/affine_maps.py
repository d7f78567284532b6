"""DeepSpeed's affine maps: the blocks of a parameter that each rank's shard has.

A block is a strided view of the whole parameter and of a shard, as `torch.as_strided`
has it, with a scale. Maps that DeepSpeed makes cut a parameter along one dim; others
are refused.

Spec: deepspeed/checkpoint/affine_ir_spec.md in DeepSpeed's repository
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from elastic_ckpt.universal.deepspeed_layout import shards
from elastic_ckpt.universal.deepspeed_layout.shards import Geometry, Segment
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.strides import row_major

VERSION = 1
# A map of blocks that overlap each other is cut into many.
_MOST_CUTS = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    rank: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    at: tuple[int, ...]


def geometry(
    entry: Any, shapes: Sequence[Sequence[int]], *, rows: int | None
) -> Geometry:
    """The geometry that a map describes.

    Args:
      entry: the map, of dicts and lists.
      shapes: of each rank's shard, as they are stored.
      rows: that are kept of the first dim; None for all.

    Raises:
      FormatError: if the map is malformed, does not fit the shards, or is of another
        kind.
    """
    try:
        logical = tuple(_integer(each) for each in entry["logical_shape"])
        blocks = []
        scales = set()
        for rank, shape in enumerate(shapes):
            stated = entry["ranks"][str(rank)]
            if list(shape) != list(stated["shard_shape"]):
                raise FormatError(
                    f"rank {rank} has a shard of shape {list(shape)}, and"
                    f" {stated['shard_shape']} is stated"
                )
            held = 0
            for piece in stated["pieces"]:
                block = _block(piece, rank, logical, shape)
                if math.prod(block.shape):
                    blocks.append(block)
                    scales.add(float(piece.get("scale", 1.0)))
                    held += math.prod(block.shape)
            if held != math.prod(shape):
                raise FormatError(f"rank {rank} has {held} elements in its blocks")
        ranks = len(entry["ranks"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the affine map is malformed ({error!r})") from None
    if ranks != len(shapes):
        raise FormatError(f"the affine map has {ranks} ranks, and {len(shapes)} exist")
    if len(scales) > 1 or not all(math.isfinite(each) and each for each in scales):
        raise FormatError(f"the blocks have the scales {sorted(scales)}, not one")
    scale = scales.pop() if scales else 1.0
    dims = {
        dim
        for dim, length in enumerate(logical)
        if any(block.shape[dim] != length for block in blocks)
    }
    if len(dims) > 1:
        raise FormatError(f"the affine map cuts the dims {sorted(dims)}, not one")
    if not dims and all(list(shape) == list(logical) for shape in shapes):
        result = shards.whole(
            logical, ranks=len(shapes), reduced="replicated", rows=rows
        )
    else:
        dim = dims.pop() if dims else 0
        if rows is not None and dim:
            raise FormatError(f"a vocabulary is cut along the dim {dim}, not 0")
        segments = _segments(blocks, dim, logical[dim])
        result = shards.cut(shapes, dim, segments, rows=rows)
    return dataclasses.replace(result, scale=scale)


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} is no size")
    return value


def _block(
    piece: Any, rank: int, logical: Sequence[int], shard: Sequence[int]
) -> _Block:
    shape = tuple(_integer(each) for each in piece["shape"])
    if len(shape) != len(logical) or len(shard) != len(logical):
        raise ValueError("a block has other dims than its parameter")
    start, at = (
        _index(piece[side], shape, whole)
        for side, whole in (("source", logical), ("dest", shard))
    )
    return _Block(rank=rank, shape=shape, start=start, at=at)


def _index(place: Any, shape: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    # The index in a row-major tensor at which a block of it begins.
    offset, strides = _integer(place[0]), place[1]
    index = []
    for length, stride, size, stated in zip(
        shape, row_major(tuple(whole), 1), whole, strides, strict=True
    ):
        if length > 1 and stride != stated:
            raise ValueError("a block is no box of its tensor")
        at, offset = divmod(offset, stride) if stride else (0, offset)
        if math.prod(shape) and at + length > size:
            raise ValueError("a block lies outside of its tensor")
        index.append(at)
    return tuple(index)


def _segments(blocks: Sequence[_Block], dim: int, length: int) -> list[Segment]:
    # Blocks may overlap: they are cut where any of them begins or ends.
    cuts = sorted(
        {0, length}
        | {block.start[dim] for block in blocks}
        | {block.start[dim] + block.shape[dim] for block in blocks}
    )
    holders: list[dict[int, int]] = [{} for _ in cuts[1:]]
    count = 0
    for block in blocks:
        if any(block.start[:dim] + block.start[dim + 1 :]) or any(
            block.at[:dim] + block.at[dim + 1 :]
        ):
            raise FormatError(f"a block is cut along other dims than {dim}")
        first = bisect.bisect_left(cuts, block.start[dim])
        stop = bisect.bisect_left(cuts, block.start[dim] + block.shape[dim])
        count += stop - first
        if count > _MOST_CUTS:
            raise FormatError("the blocks of the affine map overlap too often")
        for number in range(first, stop):
            if block.rank in holders[number]:
                raise FormatError(f"rank {block.rank} has {cuts[number]} twice")
            at = block.at[dim] + cuts[number] - block.start[dim]
            holders[number][block.rank] = at
    for start, held in zip(cuts, holders, strict=False):
        if not held:
            raise FormatError(f"no rank has {start} and what follows, along dim {dim}")
    return [
        Segment(start=start, length=stop - start, at=held)
        for (start, stop), held in zip(itertools.pairwise(cuts), holders, strict=True)
    ]
