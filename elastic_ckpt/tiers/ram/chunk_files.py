"""Memory-mapped chunk files on a RAM disk: copying values into one stores them.

Captures, and copies from peers, are written directly into the mapping of a file that
does not belong to a step yet (`take`). Then the file gets a checksum and is renamed
into its step directory (`place`). So a step is in memory only once, on the RAM disk.
Small chunks stay in ordinary memory until `place` writes them.

Clearing fresh pages takes the kernel three times as long as a copy. So the files of a
removed step stay mapped, in the slot's `spare` directory, for the next step. If there
are no spare files, they are created in advance (`prepare`). A later process removes all
files there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable
from concurrent import futures
from typing import NamedTuple

import google_crc32c
import numpy as np
from etils import epath

from elastic_ckpt.core import background, digest, storage
from elastic_ckpt.steps import layout

# Smaller chunks are written, because mapping a file takes longer than copying them.
LEAST_BYTES = 2**20
# Small enough to stay in the processor's cache between digest and checksum.
_PIECE_BYTES = 256 * 2**10


class ChunkFile(NamedTuple):
    """One chunk's mapped file, or memory for a small chunk.

    Attributes:
      memory: all bytes of the file, uint8: the values and room for their checksum.
      inode: the inode of the file; 0 if it is not mapped.
      path: the file's path until it is placed; empty if it is not mapped.
    """

    memory: np.ndarray
    inode: int
    path: str


class ChunkFiles:
    """The mapped files of one slot; any thread may use them."""

    def __init__(self, directory: epath.PathLike) -> None:
        self._directory = os.fspath(directory)
        self._lock = threading.RLock()
        self.num_made = 0
        # By size.
        self._spare: dict[int, list[ChunkFile]] = {}
        # The paths and files that were placed in steps, by step directory.
        self._placed: dict[str, list[tuple[str, ChunkFile]]] = {}
        self._preparing: list[futures.Future[None]] = []

    @property
    def spare_bytes(self) -> int:
        """The size of the spare files."""
        with self._lock:
            return sum(size * len(files) for size, files in self._spare.items())

    def take(self, num_bytes: int) -> ChunkFile:
        """Returns a file for `num_bytes` of values, with undefined content.

        Raises:
          OSError: if the RAM disk has no room for it.
        """
        background.wait(self._preparing)
        return self._take(num_bytes)

    def _take(self, num_bytes: int) -> ChunkFile:
        size = num_bytes + layout.CHECKSUM_BYTES
        if num_bytes < LEAST_BYTES:
            return ChunkFile(np.empty(size, np.uint8), 0, "")
        with self._lock:
            if kept := self._spare.get(size):
                return kept.pop()
            self.num_made += 1
            path = os.path.join(self._directory, str(self.num_made))
        try:
            return ChunkFile(*storage.mapped_file(path, size), path)
        except OSError:
            # Dropping the spare files may free up space.
            self.drop_spare()
        return ChunkFile(*storage.mapped_file(path, size), path)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Creates spare files for values of these sizes, in the background."""

        def make() -> None:
            taken: list[ChunkFile] = []
            with contextlib.suppress(OSError):
                for each in sizes:
                    taken.append(self._take(each))
            with self._lock:
                for file in taken:
                    self._spare.setdefault(len(file.memory), []).append(file)

        background.wait(self._preparing)
        self._preparing = [background.in_thread(make, name="pages")]

    def discard(self, file: ChunkFile) -> None:
        """Removes a file unless it was placed; call this before its step is removed."""
        if file.path:
            storage.remove(file.path)

    def place(
        self,
        file: ChunkFile,
        step_directory: str,
        name: str,
        named: bytes | None = None,
    ) -> bytes:
        """Adds the checksum to a file and moves the file into a step.

        A small file is written in place, because a file counts only once it is in the
        manifest.

        Args:
          file: the file with the values.
          step_directory: the step directory.
          name: the chunk's path in the step directory.
          named: the digest of the values, if known.

        Returns:
          The digest of the values.

        Raises:
          OSError: if the file cannot be written.
        """
        named = _sealed(file.memory, named)
        path = os.path.join(step_directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if file.path:
            storage.move(file.path, path)
            with self._lock:
                self._placed.setdefault(step_directory, []).append((path, file))
        else:
            storage.write_in_place(path, file.memory.data)
        return named

    def forget(self, step_directory: str) -> None:
        """Unmaps a step's files; otherwise they would use memory even once removed."""
        with self._lock:
            self._placed.pop(step_directory, None)

    def recycle(self, step_directory: str) -> None:
        """Keeps the files of a step that is being removed; the next step reuses them.

        The step's manifest must already be gone. The total size of spare files never
        exceeds this step's size.
        """
        with self._lock:
            placed = self._placed.pop(step_directory, [])
            of_step = sum(len(file.memory) for _, file in placed)
            for path, file in placed:
                if self.spare_bytes + len(file.memory) > of_step:
                    break
                with contextlib.suppress(OSError):
                    # A repaired copy is a different file.
                    if os.stat(path).st_ino == file.inode:
                        storage.move(path, file.path)
                        self._spare.setdefault(len(file.memory), []).append(file)

    def drop_spare(self) -> None:
        """Removes the spare files."""
        with self._lock:
            dropped, self._spare = self._spare, {}
        for file in itertools.chain(*dropped.values()):
            storage.remove(file.path)

    def close(self) -> None:
        """Removes all files that do not belong to a step."""
        background.wait(self._preparing)
        self._spare.clear()
        storage.remove(self._directory)


def _sealed(memory: np.ndarray, named: bytes | None) -> bytes:
    # Writes the checksum after the values and returns the values' digest.
    values = memory[: -layout.CHECKSUM_BYTES]
    # google_crc32c does not accept writable memory.
    read_only = np.frombuffer(values.data.toreadonly(), np.uint8)
    hashed, checksum = digest.values_hash(), 0
    for start in range(0, len(values), _PIECE_BYTES):
        piece = read_only[start : start + _PIECE_BYTES]
        if named is None:
            hashed.update(piece.data)
        checksum = google_crc32c.extend(checksum, piece)
    memory[len(values) :] = np.frombuffer(
        checksum.to_bytes(layout.CHECKSUM_BYTES, "little"), np.uint8
    )
    return named or hashed.digest()
