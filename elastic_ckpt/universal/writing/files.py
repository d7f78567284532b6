"""Files of arrays, written at any places and made durable.

Every file of every format is arrays at places: boxes of tensors, and bytes such as
headers, padding and checksums. What was put into a file is listed with its digest.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import digest, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import TargetTensor

Needed = Mapping[TargetTensor, Sequence[Box]]


class Write(NamedTuple):
    """An array, and its place in a file.

    Attributes:
      values: of any dtype; their bytes are written in C order.
      offset: of the first byte.
      counts: how many rows the bytes are, by dim; none if they lie in one piece.
      strides: bytes in the file from a row to the next, by dim.
    """

    values: np.ndarray
    offset: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class Held(NamedTuple):
    """What a file has at a place: a `Write`, with a digest in place of its bytes."""

    digest: str
    offset: int


class File(NamedTuple):
    """A file to write.

    Attributes:
      name: its path in the directory of the checkpoint.
      parts: the boxes of targets that it has.
      num_bytes: that are allocated at once; 0 if it grows as it is written.
    """

    name: str
    parts: Needed
    num_bytes: int = 0


def of_bytes(content: bytes | memoryview, offset: int) -> Write:
    """The write of bytes that are not of a tensor."""
    return Write(np.frombuffer(content, np.uint8), offset)


class OpenFile:
    """A local file that is written at any places, in any order.

    Attributes:
      held: what was written.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self.held: list[Held] = []
        self._num_bytes = num_bytes
        self._map: mmap.mmap | None = None
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115
        if num_bytes:
            try:
                # A full disk is an error here, and no signal in the midst of a copy.
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            except BaseException:
                self._file.close()
                raise

    def put(self, write: Write) -> None:
        """Writes bytes to their place.

        Raises:
          OSError: if there is no room.
        """
        values, offset, counts, strides = write
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.held.append(Held(digest.values_digest(content).hex(), offset))
        if counts:
            if self._map is None:
                self._map = mmap.mmap(self._file.fileno(), self._num_bytes)
            row_bytes = content.nbytes // int(np.prod(counts))
            shape = (*counts, row_bytes)
            rows = np.ndarray(shape, np.uint8, self._map, offset, (*strides, 1))
            rows[...] = content.reshape(rows.shape)
            return
        done = 0
        while done < content.nbytes:
            done += os.pwrite(self._file.fileno(), content.data[done:], offset + done)

    def close(self) -> None:
        """Makes the file durable."""
        try:
            if self._map is not None:
                self._map.close()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


@contextlib.contextmanager
def created(path: epath.Path, num_bytes: int) -> Iterator[OpenFile]:
    """Yields a file; at the end it is at `path`, durably, though not its name.

    Args:
      path: local, or in a bucket, to which the file is uploaded then.
      num_bytes: see `File`.

    Raises:
      OSError: if storage fails, or another of `bucket_clients.failures`.
    """
    storage.before("write", path)
    local = storage.is_local(path)
    staged = (
        contextlib.nullcontext(os.fspath(path)) if local else storage.atomic_path(path)
    )
    if local:
        storage.make_directory(path.parent)
    with staged as name:
        opened = OpenFile(name, num_bytes)
        try:
            yield opened
        finally:
            opened.close()
