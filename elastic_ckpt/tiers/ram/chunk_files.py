"""Files of chunks in a RAM disk, mapped into memory: what is copied there is saved.

A capture, and a copy that comes from a peer, go straight into the mapping of a file
that no step names yet (`take`). Once the values are there, the file gets their checksum
and is renamed into the directory of its step (`place`). So a step is in memory once, as
the RAM disk holds it. Small chunks are in other memory, and are written by `place`.

The kernel clears fresh pages, which takes three times as long as a copy. So the files
of a step that is removed stay mapped, in the directory `spare` of the slot, and the
next step takes them. Where none were removed, they are made ahead (`prepare`). A later
process removes what it finds there.
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

# Smaller chunks are written: a mapping takes longer than a copy of so many bytes.
LEAST_BYTES = 2**20
# A piece is still in the processor's cache when its checksum follows its digest.
_PIECE_BYTES = 256 * 2**10


class ChunkFile(NamedTuple):
    """A mapped file of one chunk, or memory for a small one.

    Attributes:
      memory: all of its bytes, uint8: the values, and room for their checksum.
      inode: of the file, whatever its path is; 0 if it is not mapped.
      path: where it lies until it is placed; empty if it is not mapped.
    """

    memory: np.ndarray
    inode: int
    path: str


class ChunkFiles:
    """The mapped files of one slot; any thread may use them.

    Args:
      directory: for files that are in no step.

    Attributes:
      num_made: how many files were made.
    """

    def __init__(self, directory: epath.PathLike) -> None:
        self._directory = os.fspath(directory)
        self._lock = threading.RLock()
        self.num_made = 0
        # By size.
        self._spare: dict[int, list[ChunkFile]] = {}
        # Those in steps, by the directory of the step, and where they are now.
        self._placed: dict[str, list[tuple[str, ChunkFile]]] = {}
        self._preparing: list[futures.Future[None]] = []

    @property
    def spare_bytes(self) -> int:
        """The bytes of files that nothing uses."""
        with self._lock:
            return sum(size * len(files) for size, files in self._spare.items())

    def take(self, num_bytes: int) -> ChunkFile:
        """A file for so many bytes of values, of undefined content.

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
            # What was spare may have been the room.
            self.drop_spare()
        return ChunkFile(*storage.mapped_file(path, size), path)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Makes what `take` finds for values of these sizes, in the background."""

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
        """Removes a file unless it was placed; its step is not removed yet."""
        if file.path:
            storage.remove(file.path)

    def place(
        self,
        file: ChunkFile,
        step_directory: str,
        name: str,
        named: bytes | None = None,
    ) -> bytes:
        """Makes a file, with its checksum, a file of a step.

        Nothing names it before the manifest does, so a small one is written in place.

        Args:
          file: with the values.
          step_directory: the directory of the step.
          name: the path of the chunk in it.
          named: the digest of the values, if it is known.

        Returns:
          The digest of the values.

        Raises:
          OSError: if it cannot be written.
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
        """Unmaps the files of a step: those that are gone use memory until then."""
        with self._lock:
            self._placed.pop(step_directory, None)

    def recycle(self, step_directory: str) -> None:
        """Keeps the files of a step that is being removed, for the next one.

        Its manifest is gone already. Spare files never take more room than this step.
        """
        with self._lock:
            placed = self._placed.pop(step_directory, [])
            of_step = sum(len(file.memory) for _, file in placed)
            for path, file in placed:
                if self.spare_bytes + len(file.memory) > of_step:
                    break
                with contextlib.suppress(OSError):
                    # A copy that was repaired is another file.
                    if os.stat(path).st_ino == file.inode:
                        storage.move(path, file.path)
                        self._spare.setdefault(len(file.memory), []).append(file)

    def drop_spare(self) -> None:
        """Removes the files that nothing uses."""
        with self._lock:
            dropped, self._spare = self._spare, {}
        for file in itertools.chain(*dropped.values()):
            storage.remove(file.path)

    def close(self) -> None:
        """Removes the files that are in no step."""
        background.wait(self._preparing)
        self._spare.clear()
        storage.remove(self._directory)


def _sealed(memory: np.ndarray, named: bytes | None) -> bytes:
    # Writes the checksum behind the values, and returns their digest.
    values = memory[: -layout.CHECKSUM_BYTES]
    # google_crc32c does not take memory that can be written.
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
