"""A process's portion of a captured state, in host memory until it is written."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.owners import Holders
from elastic_ckpt.tiers.ram.chunk_files import ChunkFile
from elastic_ckpt.tiers.source import OnPiece, ignored

# A part's leaf, by its path, and the part's box.
PartKey = tuple[str, Box]


class OnDevice(Protocol):
    """Values on a device, fetched when they are needed."""

    @property
    def nbytes(self) -> int:
        """The size of the values."""

    def fetch(self) -> np.ndarray:
        """Copies the values to host memory, which is freed with the returned array."""


Values = np.ndarray | OnDevice


def fetched(values: Values) -> np.ndarray:
    """Returns the values in host memory."""
    return values if isinstance(values, np.ndarray) else values.fetch()


class CapturedLeaf(NamedTuple):
    """The chunks of an array that this process holds.

    Attributes:
      shard_shape: the shape of every shard, on this host and elsewhere.
      boxes: each chunk on this host, once, with its values; empty for an array without
        elements.
      files: the files of chunks whose values are already on the RAM disk.
      holders: a function that returns the indices of the hosts that hold a shard, in
        ascending order; None for all hosts.
    """

    leaf: Leaf
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Values], ...]
    files: Mapping[Box, ChunkFile] = types.MappingProxyType({})
    holders: Callable[[Box], Holders | None] = lambda _: None

    def shard(self, chunk: Box) -> Box:
        """The shard that contains a chunk."""
        start = tuple(
            at - at % max(1, size)
            for at, size in zip(chunk.start, self.shard_shape, strict=True)
        )
        stop = tuple(a + n for a, n in zip(start, self.shard_shape, strict=True))
        return Box(start=start, stop=stop)


def chunked(leaf: Leaf, shard_shape: tuple[int, ...]) -> Leaf:
    """Returns `leaf` with its chunk shape, at least 1 in each dim."""
    chunk = tuple(max(1, size) for size in leaf.shape)
    if 0 not in leaf.shape:
        item_bytes = np.dtype(leaf.dtype).itemsize
        chunk = layout.chunk_shape(shard_shape, item_bytes=item_bytes)
    return dataclasses.replace(leaf, chunk=chunk)


class Captured:
    """This process's portion of a state; owns the arrays until `release`.

    Args:
      arrays: every array of the state, with this process's chunks, ordered by path;
        dropped by `release`.
      on_release: called by the first `release`.
      is_lent: whether some values are still in the caller's arrays; these must not be
        donated before the release.
    """

    def __init__(
        self,
        arrays: Sequence[CapturedLeaf],
        *,
        on_release: Callable[[], None],
        is_lent: bool = False,
    ) -> None:
        self.arrays = tuple(arrays)
        self.is_lent = is_lent
        self._on_release: Callable[[], None] | None = on_release

    @classmethod
    def joined(cls, several: Sequence[Captured]) -> Captured:
        """Joins captures of different arrays of the same state."""

        def release() -> None:
            for each in several:
                each.release()

        arrays = [array for each in several for array in each.arrays]
        return cls(
            sorted(arrays, key=lambda array: array.leaf.path),
            on_release=release,
            is_lent=any(each.is_lent for each in several),
        )

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The state's arrays, the same on every host, ordered by path."""
        return tuple(array.leaf for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """The size of all values that this process holds."""
        return sum(values.nbytes for array in self.arrays for _, values in array.boxes)

    @property
    def file_bytes(self) -> int:
        """The size of the files that already contain values."""
        return sum(
            len(file.memory) for array in self.arrays for file in array.files.values()
        )

    def release(self) -> None:
        """Releases the memory once; the values must not be used afterwards."""
        on_release, self._on_release, self.arrays = self._on_release, None, ()
        if on_release is not None:
            on_release()

    def values(self) -> dict[PartKey, Values]:
        """The values of each part that this process holds."""
        return {
            (array.leaf.path, box): of_box
            for array in self.arrays
            for box, of_box in array.boxes
        }

    def holders(self, *, num_hosts: int) -> dict[PartKey, Holders]:
        """The hosts of a world that hold each of this process's parts."""
        all_hosts = tuple(range(num_hosts))
        return {
            (array.leaf.path, box): array.holders(array.shard(box)) or all_hosts
            for array in self.arrays
            for box, _ in array.boxes
        }


class CapturedSource(NamedTuple):
    """A host's captured values, as a `source.Source`.

    Attributes:
      directory: a name, used in messages.
      values: each part's values, which must not be released during reads.
    """

    directory: str
    values: Mapping[PartKey, Values]

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> int:
        """See `source.Source`."""
        values = self.values[leaf.path, box]
        into[:] = np.ascontiguousarray(fetched(values)).reshape(-1).view(np.uint8).data
        on_piece(into)
        return values.nbytes
