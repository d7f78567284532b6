"""The boxes in which a target is read and written: few, and near in its sources.

A target is cut first along the dim that advances most in the files of its sources, so
that each part of a file goes to few boxes. A transposed matrix is cut into columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_ckpt.steps import layout
from elastic_ckpt.universal.new_moves import Move, TargetTensor
from elastic_ckpt.universal.stored import StoredTensor
from elastic_ckpt.universal.strides import row_major

CHUNK_BYTES = 2**24
# A dim with few divisors is not worth more chunks than this many times the least.
_MOST_TIMES = 8


def chunk_shape(
    target: TargetTensor,
    moves: Sequence[Move],
    tensors: Sequence[StoredTensor],
    *,
    chunk_bytes: int,
) -> tuple[int, ...]:
    """The shape of the boxes of a target; it divides the target's in each dim.

    Args:
      target: that is written.
      moves: all that go into it.
      tensors: of the checkpoint.
      chunk_bytes: the most of a box, unless dims are prime.
    """
    if not target.num_bytes:
        return tuple(max(1, size) for size in target.shape)
    dims = range(len(target.shape))
    first = sorted(dims, key=lambda dim: -_advance(dim, moves, tensors))
    orders = [first, *([dim, *(d for d in first if d != dim)] for dim in first)]
    cuts = [_cut(target, order, chunk_bytes) for order in orders]
    most = _MOST_TIMES * max(1, target.num_bytes // chunk_bytes)
    return next((chunk for count, chunk in cuts if count <= most), min(cuts)[1])


def _cut(
    target: TargetTensor, order: Sequence[int], chunk_bytes: int
) -> tuple[int, tuple[int, ...]]:
    # The number of chunks, and their shape, if dims are cut in this order.
    shape = layout.chunk_shape(
        [target.shape[dim] for dim in order],
        item_bytes=target.dtype.itemsize,
        chunk_bytes=chunk_bytes,
    )
    size = dict(zip(order, shape, strict=True))
    chunk = tuple(size[dim] for dim in range(len(order)))
    return math.prod(target.shape) // math.prod(chunk), chunk


def _advance(dim: int, moves: Sequence[Move], tensors: Sequence[StoredTensor]) -> float:
    # By how many bytes the outermost factor of a dim advances in a source; more than
    # any if the dim's elements are of several sources.
    if len({move.target_side.start[dim] for move in moves}) > 1:
        return math.inf
    if not moves:
        return 0
    move = moves[0]
    tensor = tensors[move.source]
    strides = row_major(tensor.shape, tensor.dtype.itemsize)
    if tensor.fragments:
        strides = tensor.fragments[0].strides
    steps = [
        move.source_side.steps[factor] * strides[move.source_side.dims[factor]]
        for factor, along in enumerate(move.target_side.dims)
        if along == dim and move.source_side.dims[factor] >= 0
    ]
    return max(steps, default=0)
