"""Stored tensors of leaves that this library saved: their boxes are fragments."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from elastic_ckpt.core import box_cover
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.universal.formats import coverage
from elastic_ckpt.universal.stored import Fragment, StoredTensor
from elastic_ckpt.universal.strides import row_major


def tensor(
    leaf: Leaf,
    name: str,
    saved: Iterable[tuple[Box, str, int]],
    *,
    is_overlapping: bool,
) -> StoredTensor:
    """The tensor of a leaf.

    Args:
      leaf: that was saved.
      name: of the tensor.
      saved: its boxes, the file of each, and the place of its first byte there.
      is_overlapping: whether boxes share elements; these are read from the first.

    Raises:
      FormatError: if the boxes leave out an element.
    """
    shape = coverage.checked_shape(leaf.shape, leaf.path)
    dtype = np.dtype(leaf.dtype)
    covered: list[Box] = []
    fragments: list[Fragment] = []
    for box, file, offset in saved:
        parts = [box]
        if is_overlapping:
            before = Boxes.from_boxes(covered, rank=len(shape))
            bare = box_cover.gaps(box, before)
            parts = [bare[number] for number in range(len(bare))]
            covered.append(box)
        strides = row_major(box.shape, dtype.itemsize)
        for part in parts:
            skips = zip(part.start, box.start, strides, strict=True)
            skipped_bytes = sum((a - b) * stride for a, b, stride in skips)
            fragments.append(
                Fragment(
                    box=part, file=file, offset=offset + skipped_bytes, strides=strides
                )
            )
    coverage.check(shape, [each.box for each in fragments], leaf.path)
    return StoredTensor(name=name, dtype=dtype, shape=shape, fragments=tuple(fragments))
