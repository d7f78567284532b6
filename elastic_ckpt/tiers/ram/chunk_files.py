"""Files of chunks in a RAM disk, mapped into memory: what is copied there is saved.

A capture, and a copy that comes from a peer, go straight into the mapping of a file
that no step names yet (`take`). Once the digest of its values is known, the file gets
its checksum and is renamed into the directory of its step (`place`). So a step is in
memory once, as the RAM disk holds it.

The kernel clears fresh pages, which takes three times as long as a copy. So the files
of a step that is removed stay mapped, in the directory `spare` of the slot, and the
next step takes them. A later process removes what it finds there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import NamedTuple

import google_crc32c
import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, digest, storage
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import zarr_array

# Smaller chunks are written: a mapping takes longer than a copy of so many bytes.
LEAST_BYTES = 2**20
# A piece is still in the processor's cache when its checksum follows its digest.
_PIECE_BYTES = 256 * 2**10


class ChunkFile(NamedTuple):
    """A mapped file of one chunk.

    Attributes:
      memory: all of its bytes, uint8: the values, and room for their checksum.
      inode: of the file, whatever its path is.
      path: where it lies until it is placed.
    """

    memory: np.ndarray
    inode: int
    path: str

    def values(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The values, as an array in the mapping."""
        return np.ndarray(shape, dtype, self.memory)


class ChunkFiles:
    """The mapped files of one slot; any thread may use them.

    Args:
      directory: for files that are in no step.
    """

    def __init__(self, directory: epath.PathLike) -> None:
        self._directory = os.fspath(directory)
        self._lock = threading.RLock()
        self._num_made = 0
        # By size; and those in use, which are in no step yet.
        self._spare: dict[int, list[ChunkFile]] = {}
        self._taken: dict[int, ChunkFile] = {}
        # Those in steps, by the directory of the step and the file in it.
        self._placed: dict[str, dict[str, ChunkFile]] = {}

    @property
    def taken_bytes(self) -> int:
        """The bytes of files that are to be placed."""
        with self._lock:
            return sum(len(each.memory) for each in self._taken.values())

    @property
    def spare_bytes(self) -> int:
        """The bytes of files that nothing uses."""
        with self._lock:
            return self._num_spare_bytes()

    def take(self, num_bytes: int) -> ChunkFile:
        """A file for so many bytes of values, of undefined content.

        Raises:
          OSError: if the RAM disk has no room for it.
        """
        size = num_bytes + layout.CHECKSUM_BYTES
        with self._lock:
            kept = self._spare.get(size)
            file = kept.pop() if kept else self._made(size)
            self._taken[file.inode] = file
        return file

    def _made(self, size: int) -> ChunkFile:
        self._num_made += 1
        path = os.path.join(self._directory, str(self._num_made))
        try:
            return ChunkFile(*storage.mapped_file(path, size), path)
        except OSError:
            # What was spare may have been the room.
            if not self.drop_spare():
                raise
        return ChunkFile(*storage.mapped_file(path, size), path)

    def discard(self, file: ChunkFile) -> None:
        """Removes a file unless it was placed."""
        with self._lock:
            if self._taken.pop(file.inode, None) is None:
                return
        self._remove([file])

    def place(self, file: ChunkFile, step_directory: str, name: str) -> None:
        """Makes a file, with its checksum, a file of a step.

        The directory that it lies in has to exist.
        """
        storage.move(file.path, os.path.join(step_directory, name))
        with self._lock:
            del self._taken[file.inode]
            self._placed.setdefault(step_directory, {})[name] = file

    def forget_removed(self, step_directory: str) -> None:
        """Unmaps files of a step that are gone: their memory is in use until then."""
        with self._lock:
            placed = self._placed.pop(step_directory, {})
            left = {
                name: file
                for name, file in placed.items()
                if os.path.exists(os.path.join(step_directory, name))
            }
            if left:
                self._placed[step_directory] = left

    def recycle(self, step_directory: str) -> None:
        """Keeps the files of a step that is being removed, for the next one.

        Its manifest is gone already. Spare files never take more room than this step.
        """
        with self._lock:
            placed = self._placed.pop(step_directory, {})
        of_step = sum(len(each.memory) for each in placed.values())
        for name, file in placed.items():
            path = os.path.join(step_directory, name)
            with self._lock:
                if self._num_spare_bytes() + len(file.memory) > of_step:
                    break
            with contextlib.suppress(OSError):
                # A copy that was repaired is another file.
                if os.stat(path).st_ino != file.inode:
                    continue
                storage.move(path, file.path)
                with self._lock:
                    self._spare.setdefault(len(file.memory), []).append(file)

    def drop_spare(self) -> bool:
        """Removes the files that nothing uses; whether there were any."""
        with self._lock:
            dropped = [file for files in self._spare.values() for file in files]
            self._spare.clear()
        self._remove(dropped)
        return bool(dropped)

    def close(self) -> None:
        """Removes the files that are in no step."""
        self.drop_spare()
        with self._lock:
            taken, self._taken = list(self._taken.values()), {}
        self._remove(taken)

    def _remove(self, files: Iterable[ChunkFile]) -> None:
        for file in files:
            storage.remove(file.path)
        with self._lock, contextlib.suppress(OSError):
            # Unless others are in it.
            os.rmdir(self._directory)

    def _num_spare_bytes(self) -> int:
        return sum(size * len(files) for size, files in self._spare.items())


class ChunkWriter:
    """Writes the chunks of one step; any thread may call it.

    Nothing names them before the manifest does: they are written in place.

    Args:
      directory: of the step.
      files: of the slot.
    """

    def __init__(self, directory: epath.PathLike, files: ChunkFiles) -> None:
        self.directory = os.fspath(directory)
        self._files = files
        self._made: set[str] = set()
        self._described: set[str] = set()

    def describe(self, leaf: Leaf) -> None:
        """Writes the metadata of an array, once."""
        if leaf.path in self._described:
            return
        name = f"{layout.leaf_directory(leaf.path)}/{zarr_array.METADATA}"
        storage.write_in_place(self._path(name), zarr_array.metadata_file(leaf))
        self._described.add(leaf.path)

    def write(
        self,
        leaf: Leaf,
        box: boxes.Box,
        values: np.ndarray,
        file: ChunkFile | None = None,
        *,
        named: bytes | None = None,
    ) -> bytes:
        """Writes a chunk, and returns the digest of its values.

        Args:
          leaf: that it is of.
          box: of the chunk.
          values: of the box.
          file: that has the values, which is placed; by default they are copied.
          named: the digest of the values, if it is known.

        Raises:
          OSError: if they cannot be written.
        """
        name = layout.part_file(leaf, box)
        path = self._path(name)
        if file is None and values.nbytes >= LEAST_BYTES:
            file = self._files.take(values.nbytes)
            np.copyto(file.values(box.shape, values.dtype), values)
        if file is not None:
            named = _sealed(file.memory, named)
            self._files.place(file, self.directory, name)
            return named
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        checksum = google_crc32c.value(flat.tobytes())
        storage.write_in_place(path, flat.data, checksum.to_bytes(4, "little"))
        return named or digest.values_digest(flat)

    def _path(self, name: str) -> str:
        path = os.path.join(self.directory, name)
        parent = os.path.dirname(path)
        if parent not in self._made:
            os.makedirs(parent, exist_ok=True)
            self._made.add(parent)
        return path


def _sealed(memory: np.ndarray, named: bytes | None) -> bytes:
    # Writes the checksum behind the values, and returns their digest.
    values = memory[: -layout.CHECKSUM_BYTES]
    # google_crc32c does not take memory that can be written.
    read_only = values.view()
    read_only.flags.writeable = False
    hashed, checksum = digest.values_hash(), 0
    for start in range(0, len(values), _PIECE_BYTES):
        piece = read_only[start : start + _PIECE_BYTES]
        if named is None:
            hashed.update(piece.data)
        checksum = google_crc32c.extend(checksum, piece)
    content = checksum.to_bytes(layout.CHECKSUM_BYTES, "little")
    memory[-layout.CHECKSUM_BYTES :] = np.frombuffer(content, np.uint8)
    return named or hashed.digest()
