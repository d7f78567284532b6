"""Chunks of leaves, written as zarr v3 arrays by TensorStore, many at a time.

Each is a file that appears whole or not at all, and is durable when its write is done.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Contents, Fragment
from elastic_ckpt.tiers import zarr_array
from elastic_ckpt.tiers.captured import CapturedLeaf

# The exceptions that TensorStore raises.
WRITE_ERRORS = (OSError, RuntimeError, ValueError)
# More at a time is no faster, and each has a copy of its chunk until it is written.
_MAX_IN_FLIGHT_BYTES = 4 * layout.CHUNK_BYTES
_MAX_IN_FLIGHT = 64


class ChunkWriter:
    """Writes chunks into a step's directory.

    Attributes:
      directory: of the step.
      contents: of the step.
    """

    def __init__(self, directory: epath.PathLike, contents: Contents) -> None:
        self.directory = os.fspath(directory)
        self.contents = contents
        # Nothing is read here, so nothing is kept.
        base = {"driver": "file", "path": os.path.join(self.directory, "")}
        self._arrays = zarr_array.ArrayWriter(
            base, context=ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        )

    def write(self, captured: dict[int, CapturedLeaf]) -> list[Fragment]:
        """Writes all boxes, by the numbers of their leaves, and waits until it is done.

        Raises:
          CheckpointError: if a box does not lie on the grid of its leaf's chunks.
          WRITE_ERRORS: of TensorStore, when nothing is being written any more.
        """
        chunks = {
            leaf: layout.chunk_shape(part.shard_shape, item_bytes=_item_bytes(part))
            for leaf, part in captured.items()
            if part.boxes
        }
        fragments = []
        in_flight = _InFlight()
        try:
            for leaf, chunk in chunks.items():
                description = self.contents.leaves[leaf]
                prefix = layout.leaf_directory(description.path) + "/"
                in_flight.add(self._arrays.describe(prefix, description, chunk), 0)
                for box, values in captured[leaf].boxes:
                    for part in layout.cut(box, chunk):
                        some = values[boxes.relative(part, box)]
                        name = digest.values_digest(some)
                        fragments.append(self._fragment(leaf, part, name))
                        write = self._arrays.write(
                            prefix, description, chunk, part, some
                        )
                        in_flight.add(write, some.nbytes)
        finally:
            in_flight.drain()
        in_flight.check()
        return fragments

    def put(self, fragment: Fragment, values: np.ndarray) -> Fragment:
        """Writes a chunk that another host has, in the place that it has here.

        The metadata of its array is written too.

        Args:
          fragment: as the other host's manifest lists it: a whole chunk.
          values: of its box; the caller has compared their digest.

        Returns:
          The fragment as it lies here.

        Raises:
          WRITE_ERRORS: of TensorStore.
        """
        leaf, chunk = self.contents.leaves[fragment.leaf], fragment.box.shape
        prefix = layout.leaf_directory(leaf.path) + "/"
        self._arrays.describe(prefix, leaf, chunk).result()
        self._arrays.write(prefix, leaf, chunk, fragment.box, values).result()
        return self._fragment(fragment.leaf, fragment.box, fragment.digest)

    def _fragment(self, leaf: int, box: boxes.Box, name: bytes) -> Fragment:
        description = self.contents.leaves[leaf]
        stored = layout.num_bytes(box, description.dtype) + layout.CHECKSUM_BYTES
        return Fragment(
            leaf=leaf,
            box=box,
            digest=name,
            file=layout.chunk_file(description.path, box, box.shape),
            offset=0,
            stored_bytes=stored,
        )


class _InFlight:
    # Writes that were begun, a bounded number; the first failure is kept.

    def __init__(self) -> None:
        self._writes: collections.deque[tuple[Any, int]] = collections.deque()
        self._num_bytes = 0
        self._error: Exception | None = None

    def add(self, write: ts.Future[None], num_bytes: int) -> None:
        self._writes.append((write, num_bytes))
        self._num_bytes += num_bytes
        while (
            len(self._writes) > _MAX_IN_FLIGHT or self._num_bytes > _MAX_IN_FLIGHT_BYTES
        ):
            self._wait()
        self.check()

    def drain(self) -> None:
        while self._writes:
            self._wait()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        write, num_bytes = self._writes.popleft()
        self._num_bytes -= num_bytes
        try:
            write.result()
        except WRITE_ERRORS as error:
            self._error = self._error or error


def _item_bytes(part: CapturedLeaf) -> int:
    return np.dtype(part.leaf.dtype).itemsize
