"""Files in object stores: read ahead in blocks, by parallel ranged requests.

The readers of a process share the blocks in memory, so a file that is opened again is
read on from there. Blocks are of one version of a file. Each block of a file that is in
memory before the one that is read has one more block requested ahead, up to a limit: a
reader that goes through a file has many requests on their way, and one that jumps about
requests little that it needs not. Bytes that will be read next are requested before
(`read_ahead`). Readers share the memory for blocks that were requested and not read yet
by dynamic thresholds: each has at most as much as is free (Choudhury and Hahne, 1998).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import errno
import functools
import io
import os
import shutil
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from elastic_ckpt.core import bucket_clients, digest, storage, working_directory

BLOCK_BYTES = 2 * 2**20
# The most blocks in memory, and of these the most ahead of a reader.
_MAX_BLOCKS = 128
_MAX_AHEAD = 16
# The part of the memory for blocks that were requested ahead and not read yet.
_SHARE_AHEAD = 0.75
# The most requests on their way at a time.
_REQUESTS = 16
_BUFFER_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Object:
    """A file in an object store, as fsspec finds it.

    Attributes:
      url: its address.
      version: that the store has of it: it changes with each write; empty if the store
        shows none.
      system: fsspec's file system.
      path: in the file system.
      num_bytes: its size.
    """

    url: str
    version: str
    system: Any = dataclasses.field(compare=False)
    path: str = dataclasses.field(compare=False)
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return -(-self.num_bytes // BLOCK_BYTES)

    @property
    def key(self) -> tuple[str, str, int]:
        """Equal for equal objects; its hash takes a tenth of the time of theirs."""
        return self.url, self.version, self.num_bytes

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, by one request.

        Raises:
          OSError: if the store does not return them; with an `errno` in any case.
        """
        try:
            content = self.system.cat_file(self.path, start=start, end=stop)
        except (FileNotFoundError, PermissionError):
            raise
        except bucket_clients.failures() as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        if len(content) != stop - start:
            raise OSError(
                errno.EIO,
                f"{len(content)} bytes instead of {stop - start} from byte {start} on",
            )
        return content


class Blocks:
    """The blocks of files that were read last, and those that are on their way.

    Args:
      max_blocks: the most in memory; those that were not used for longest go.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _REQUESTS, thread_name_prefix="remote-file"
        )
        self._blocks: collections.OrderedDict[
            tuple[tuple[str, str, int], int], concurrent.futures.Future[bytes]
        ] = collections.OrderedDict()
        # Those that were requested ahead and not read yet.
        self._unread: set[tuple[tuple[str, str, int], int]] = set()

    def get(self, remote: Object, first: int, last: int) -> Sequence[bytes]:
        """The blocks of a file from the `first` to the `last`; requests more.

        Raises:
          OSError: if one cannot be read; it is requested again by the next call.
        """
        key = remote.key
        with self._lock:
            before = 0
            while before < _MAX_AHEAD and (key, first - 1 - before) in self._blocks:
                before += 1
            requested = [self._requested(remote, n) for n in range(first, last + 1)]
            self._unread.difference_update((key, n) for n in range(first, last + 1))
            self._request_ahead(remote, last + 1, last + before)
        blocks = []
        for number, block in enumerate(requested, start=first):
            try:
                blocks.append(block.result())
            except OSError:
                with self._lock:
                    if self._blocks.get((key, number)) is block:
                        del self._blocks[key, number]
                raise
        return blocks

    def read_ahead(self, remote: Object, first: int, last: int) -> None:
        """Requests blocks of a file from the `first` to the `last`, up to a limit."""
        with self._lock:
            self._request_ahead(remote, first, min(last, first + _MAX_AHEAD - 1))

    def forget(self) -> None:
        """Drops all blocks, and the answers to requests under way."""
        with self._lock:
            self._blocks.clear()
            self._unread.clear()

    def _request_ahead(self, remote: Object, first: int, last: int) -> None:
        for number in range(first, min(last, remote.num_blocks - 1) + 1):
            block = (remote.key, number)
            if block not in self._blocks:
                free = int(self._max_blocks * _SHARE_AHEAD) - len(self._unread)
                if number - first >= free:
                    break
                self._unread.add(block)
            self._requested(remote, number)
        while len(self._blocks) > self._max_blocks:
            self._unread.discard(self._blocks.popitem(last=False)[0])

    def _requested(
        self, remote: Object, number: int
    ) -> concurrent.futures.Future[bytes]:
        key = (remote.key, number)
        if key not in self._blocks:
            start = number * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, remote.num_bytes)
            self._blocks[key] = self._pool.submit(remote.read, start, stop)
        self._blocks.move_to_end(key)
        return self._blocks[key]


class _Reader(io.RawIOBase):
    # A position in a file, and the block before it, as most reads are of less.
    def __init__(self, remote: Object, blocks: Blocks) -> None:
        self._remote = remote
        self._blocks = blocks
        self._at = 0
        self._number, self._block = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        ends = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}
        self._at = max(0, ends[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        # Large reads are parts of what is kept, so that their own blocks stay in it.
        most = _MAX_AHEAD * BLOCK_BYTES
        stop = min(self._at + min(len(into), most), self._end)
        if stop <= self._at:
            return 0
        first, last = self._at // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        num_bytes = stop - self._at
        done = 0
        if first == last == self._number:
            blocks: Sequence[bytes] = (self._block,)
        else:
            blocks = self._blocks.get(self._remote, first, last)
            self._number, self._block = last, blocks[-1]
        for block in blocks:
            inside = (self._at + done) % BLOCK_BYTES
            part = memoryview(block)[inside : inside + num_bytes - done]
            into[done : done + len(part)] = part
            done += len(part)
        self._at = stop
        return num_bytes

    @property
    def _end(self) -> int:
        return self._remote.num_bytes


def opened(remote: Object) -> BinaryIO:
    """The file open for reading, seekable."""
    return io.BufferedReader(_Reader(remote, _blocks()), _BUFFER_BYTES)


def read_ahead(remote: Object, start: int, stop: int) -> None:
    """Requests the bytes from `start` to `stop` before they are read, up to a limit."""
    _blocks().read_ahead(remote, start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES)


def copied(remote: Object) -> str:
    """The path of a copy on this machine, for readers that need one.

    It is made once in each process, and ends with it; that of a killed process ends
    with the next start (`core.working_directory`).

    Raises:
      OSError: if it cannot be read, or this machine has no room for it.
    """
    identity = f"{remote.url} {remote.version} {remote.num_bytes}"
    name = f"{digest.name_hash(identity):016x}-{os.path.basename(remote.path)}"
    with _COPIES_LOCK:
        path = os.path.join(_directory()[0], name)
        lock = _COPYING.setdefault(path, threading.Lock())
    with lock:
        if not os.path.exists(path):
            with (
                opened(remote) as stream,
                storage.atomic_path(path) as temporary,
                open(temporary, "wb") as file,
            ):
                shutil.copyfileobj(stream, file, _MAX_AHEAD * BLOCK_BYTES)
    return path


_COPIES_LOCK = threading.Lock()
_COPYING: dict[str, threading.Lock] = {}


@functools.cache
def _directory() -> tuple[str, working_directory.WorkingDirectory]:
    # The directory ends with the object.
    path = working_directory.new_path()
    return path, working_directory.WorkingDirectory(path)


def forget() -> None:
    """Drops all blocks of this process, after a file has changed."""
    _blocks().forget()


@functools.cache
def _blocks() -> Blocks:
    return Blocks()


# A forked process has none of the threads that answer the requests.
os.register_at_fork(after_in_child=_blocks.cache_clear)
