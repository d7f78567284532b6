"""Reads and writes of large local files past the page cache, where that is possible.

A fresh page of the cache costs more than the copy into it, above all on virtual
machines. File systems without direct access, such as that of `/dev/shm`, are used
through the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import numpy as np

from elastic_ckpt.core import host_memory

# Offsets, sizes and memory are multiples of this.
_BLOCK_BYTES = 4096
# Memory of this size is of whole pages.
_LEAST_BYTES = 2**21


def allocate(num_bytes: int) -> np.ndarray:
    """Memory of whole blocks for `num_bytes`, uint8, and one block more."""
    # A range that is read can begin and end within a block.
    whole = _in_blocks(num_bytes) + _BLOCK_BYTES
    return host_memory.allocate(max(_LEAST_BYTES, whole))


def write(path: str, memory: np.ndarray, num_bytes: int) -> None:
    """Writes a new file; it is durable after `storage.sync`.

    Args:
      path: of the file.
      memory: made by `allocate`.
      num_bytes: how many of its first bytes are written.

    Raises:
      OSError: if there is no room.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        _write(descriptor, memory[: _in_blocks(num_bytes)], 0)
        os.ftruncate(descriptor, num_bytes)


def put(path: str, offset: int, content: np.ndarray, memory: np.ndarray) -> None:
    """Writes bytes into a file; its first and its last block through the cache.

    Args:
      path: of the file.
      offset: of the first byte.
      content: uint8.
      memory: made by `allocate`, for one system call.

    Raises:
      OSError: if storage fails.
    """
    size = content.nbytes
    first = min(size, _in_blocks(offset) - offset)
    last = max(first, (offset + size) // _BLOCK_BYTES * _BLOCK_BYTES - offset)
    with _opened(path, os.O_WRONLY) as descriptor:
        for at in range(first, last, memory.nbytes):
            part = content[at : min(last, at + memory.nbytes)]
            memory[: part.nbytes] = part
            _write(descriptor, memory[: part.nbytes], offset + at)
    with open(path, "r+b", buffering=0) as file:
        _write(file.fileno(), content[:first], offset)
        _write(file.fileno(), content[last:], offset + last)


def _write(descriptor: int, content: np.ndarray, offset: int) -> None:
    done = 0
    while done < content.nbytes:
        done += os.pwrite(descriptor, content.data[done:], offset + done)


class Reader:
    """Reads ranges of files into the same memory; used by one thread.

    Args:
      memory: made by `allocate`; None to allocate it when it is needed.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        self._memory = np.empty(0, np.uint8) if memory is None else memory
        self._num_bytes = max(0, self._memory.nbytes - _BLOCK_BYTES)

    def read(self, path: str, offset: int, num_bytes: int) -> np.ndarray:
        """Reads a range of a file.

        Args:
          path: of the file.
          offset: of the first byte.
          num_bytes: of the range.

        Returns:
          Its bytes until the next call, uint8; less at the end of the file.

        Raises:
          OSError: if the file cannot be read.
        """
        if self._num_bytes < num_bytes:
            self._memory = allocate(num_bytes)
            self._num_bytes = self._memory.nbytes - _BLOCK_BYTES
        skipped = offset % _BLOCK_BYTES
        stop = skipped + num_bytes
        done = 0
        with _opened(path, os.O_RDONLY) as descriptor:
            while done < stop:
                rest = self._memory.data[done : _in_blocks(stop)]
                count = os.preadv(descriptor, [rest], offset - skipped + done)
                done += count
                # A file ends within a block.
                if not count or done % _BLOCK_BYTES:
                    break
        return self._memory[skipped : min(done, stop)]


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        yield descriptor
    finally:
        os.close(descriptor)
