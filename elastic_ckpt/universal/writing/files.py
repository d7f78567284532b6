"""Files of arrays: written, made durable, and compared with what reads back.

Every file of every format is arrays at places: boxes of tensors, and bytes such as
headers, padding and checksums. What was put into a file is listed with its digest, and
the list, a few bytes for each array, tells later whether the file still has all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import bucket_clients, digest, host_memory, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import TargetTensor

# Of direct access: offsets, sizes and memory are multiples of it.
_BLOCK_BYTES = 4096
# Less is written through the page cache; the most of one call.
_LEAST_DIRECT_BYTES, _CALL_BYTES = 2**20, 2**22
_MEMORY = host_memory.Pool()
# Memory of this size is of whole pages.
_LEAST_BYTES = 2**21

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

    num_bytes: int
    digest: str
    offset: int
    counts: Sequence[int]
    strides: Sequence[int]


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
        self.held.append(
            Held(
                content.nbytes,
                _digest(content),
                offset,
                counts,
                strides,
            )
        )
        if counts:
            if self._map is None:
                self._map = mmap.mmap(self._file.fileno(), self._num_bytes)
            rows = _rows(self._map, self.held[-1])
            rows[...] = content.reshape(rows.shape)
            return
        self._write(content, offset)

    def _write(self, content: np.ndarray, offset: int) -> None:
        # Whole blocks go past the page cache, whose fresh pages cost more than a copy.
        first = min(content.nbytes, -offset % _BLOCK_BYTES)
        last = (offset + content.nbytes) // _BLOCK_BYTES * _BLOCK_BYTES - offset
        if last - first < _LEAST_DIRECT_BYTES:
            _pwrite(self._file.fileno(), content, offset)
            return
        _pwrite(self._file.fileno(), content[:first], offset)
        _pwrite(self._file.fileno(), content[last:], offset + last)
        memory = _MEMORY.take(_CALL_BYTES)
        try:
            with _direct(self._file.name, os.O_WRONLY) as descriptor:
                for at in range(first, last, _CALL_BYTES):
                    part = content[at : min(last, at + _CALL_BYTES)]
                    memory[: part.nbytes] = part
                    _pwrite(descriptor, memory[: part.nbytes], offset + at)
        finally:
            _MEMORY.give_back(memory)

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


def reads_back(path: epath.Path, held: Iterable[Held]) -> bool:
    """Whether a file has what was written; in a bucket, it is downloaded for that.

    Bytes in one piece are read from the disk, past the page cache, where the file
    system can do that. Memory: that of the largest write.
    """
    memory = np.empty(0, np.uint8)
    try:
        with (
            _on_this_machine(path) as name,
            _direct(name, os.O_RDONLY) as descriptor,
        ):
            mapped: mmap.mmap | None = None
            for each in held:
                if each.counts:
                    if mapped is None:
                        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
                    content = np.array(_rows(mapped, each))
                else:
                    room = each.num_bytes + 2 * _BLOCK_BYTES
                    if memory.nbytes < room:
                        memory = host_memory.allocate(max(room, _LEAST_BYTES))
                    content = _read(descriptor, memory, each)
                if _digest(content) != each.digest:
                    return False
    # A file that is cut short cannot have these rows.
    except (FileNotFoundError, ValueError, TypeError):
        return False
    return True


def _digest(content: np.ndarray) -> str:
    return digest.values_digest(content).hex()


@contextlib.contextmanager
def _direct(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        yield descriptor
    finally:
        os.close(descriptor)


def _pwrite(descriptor: int, content: np.ndarray, offset: int) -> None:
    done = 0
    while done < content.nbytes:
        done += os.pwrite(descriptor, content.data[done:], offset + done)


def _read(descriptor: int, memory: np.ndarray, held: Held) -> np.ndarray:
    # Whole blocks into memory of whole pages; less at the end of the file.
    skipped = held.offset % _BLOCK_BYTES
    stop = skipped + held.num_bytes
    size = -(-stop // _BLOCK_BYTES) * _BLOCK_BYTES
    done = 0
    while done < stop:
        rest = memory.data[done:size]
        count = os.preadv(descriptor, [rest], held.offset - skipped + done)
        done += count
        # A file ends within a block.
        if not count or done % _BLOCK_BYTES:
            break
    return memory[skipped : min(done, stop)]


def _rows(mapped: mmap.mmap, held: Held) -> np.ndarray:
    row_bytes = held.num_bytes // int(np.prod(held.counts))
    return np.ndarray(
        (*held.counts, row_bytes), np.uint8, mapped, held.offset, (*held.strides, 1)
    )


@contextlib.contextmanager
def _on_this_machine(path: epath.Path) -> Iterator[str]:
    if storage.is_local(path):
        yield os.fspath(path)
        return
    filesystem, name = bucket_clients.opened(os.fspath(path))
    with tempfile.NamedTemporaryFile() as file:
        filesystem.get_file(name, file.name)
        yield file.name
