"""The boxes of a step in any tier of its run, as files that plans read.

A box is read whole, since its digest is that of the whole: from the nearest holder with
a good copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.core import box_cover
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.steps.manifest import Contents, Leaf
from elastic_ckpt.universal.formats.checkpoint import (
    Fragment,
    StoredTensor,
    check_cover,
    checked_shape,
)
from elastic_ckpt.universal.reading import byte_source
from elastic_ckpt.universal.strides import row_major


class SavedBoxes(byte_source.ByteSource):
    """The boxes of the leaves of a tree.

    Args:
      saved: of the step.
      tree: its name.

    Attributes:
      tensors: the leaves, as `tensors_of` has them, with a file for each box.
    """

    def __init__(self, saved: VerifiedReader, tree: str) -> None:
        self._saved = saved
        self._numbers: dict[str, int] = {}
        leaves = saved.table.contents.leaves
        self.tensors = [
            _tensor(
                leaves[number],
                name,
                [
                    (saved.table.box(each), self._file(each))
                    for each in saved.of_leaf(number)
                ],
                is_overlapping=number in saved.table.overlapping,
            )
            for number, name in _leaves(saved.table.contents, tree).items()
        ]

    def range_of(self, file: str, start: int, stop: int) -> tuple[int, int]:
        """See `ByteSource`."""
        del start, stop
        return 0, int(self._saved.table.num_bytes[self._numbers[file]])

    def request_bytes(self, file: str, num_bytes: int, *, is_direct: bool) -> int:
        """See `ByteSource`."""
        del file
        # A client of storage returns bytes of its memory.
        return num_bytes if is_direct else 2 * num_bytes

    def read_into(self, file: str, start: int, parts: Sequence[np.ndarray]) -> int:
        """See `ByteSource`.

        Raises:
          CheckpointError: if no holder has the box as it was saved.
        """
        assert start == 0
        num_bytes = sum(part.nbytes for part in parts)
        whole = parts[0] if len(parts) == 1 else np.empty(num_bytes, np.uint8)
        self._saved.read_into(self._numbers[file], whole)
        if whole is not parts[0]:
            byte_source.scatter(whole, parts)
        return num_bytes

    def _file(self, number: int) -> str:
        file = self._saved.place(number)
        self._numbers[file] = number
        return file


def tensors_of(contents: Contents, tree: str) -> list[StoredTensor]:
    """The leaves of a tree of a step, without places of their values."""
    return [
        StoredTensor(
            name=name,
            dtype=np.dtype(contents.leaves[number].dtype),
            shape=contents.leaves[number].shape,
        )
        for number, name in _leaves(contents, tree).items()
    ]


def _tensor(
    leaf: Leaf, name: str, saved: Iterable[tuple[Box, str]], *, is_overlapping: bool
) -> StoredTensor:
    # `saved` has the boxes of the leaf and their files. Elements that several boxes
    # share are read from the first.
    shape = checked_shape(leaf.shape, leaf.path)
    dtype = np.dtype(leaf.dtype)
    covered: list[Box] = []
    fragments: list[Fragment] = []
    for box, file in saved:
        parts = [box]
        if is_overlapping:
            before = Boxes.from_boxes(covered, rank=len(shape))
            bare = box_cover.gaps(box, before)
            parts = [bare[number] for number in range(len(bare))]
            covered.append(box)
        strides = row_major(box.shape, dtype.itemsize)
        for part in parts:
            skips = zip(part.start, box.start, strides, strict=True)
            offset = sum((a - b) * stride for a, b, stride in skips)
            fragments.append(
                Fragment(box=part, file=file, offset=offset, strides=strides)
            )
    check_cover(shape, [each.box for each in fragments], leaf.path)
    return StoredTensor(name=name, dtype=dtype, shape=shape, fragments=tuple(fragments))


def _leaves(contents: Contents, tree: str) -> dict[int, str]:
    # The numbers of the leaves of a tree, and their names in it.
    return {
        number: leaf.path.partition("/")[2]
        for number, leaf in enumerate(contents.leaves)
        if leaf.path.partition("/")[0] == tree
    }
