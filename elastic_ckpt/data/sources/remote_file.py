"""Files in object stores: read ahead in blocks, by parallel ranged requests.

The readers of a process share the blocks that were used last, so a file that is opened
again is read on from there. Blocks are of one version of a file. Each block of a file
that is in memory before the one that is read has one more block requested ahead, up to
a limit: a reader that goes through a file has many requests on their way, unless others
need the memory, and one that jumps about requests little that it needs not. Bytes that
will be read next are requested before (`read_ahead`).
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
from typing import Any, BinaryIO

from elastic_ckpt.core import bucket_clients, digest, storage, working_directory

BLOCK_BYTES = 2 * 2**20
# The most blocks in memory, and of these the most ahead of a reader.
_MAX_BLOCKS = 128
_MAX_AHEAD = 16
# The most blocks that are requested for one that will be read.
_MAX_REQUESTED = 4
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
    def last_block(self) -> int:
        """The number of the last block; -1 if there is none."""
        return -(-self.num_bytes // BLOCK_BYTES) - 1

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
    """The blocks of files that were used last, and those that are on their way.

    Args:
      max_blocks: the most in memory.
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

    def get(self, remote: Object, first: int, last: int, end: int) -> list[bytes]:
        """The blocks of a file from the `first` to the `last`; requests more.

        Args:
          remote: the file.
          first: the number of the first block.
          last: that of the last.
          end: the one before which others are requested ahead.

        Raises:
          OSError: if one cannot be read; it is requested again by the next call.
        """
        before = 0
        while before < _MAX_AHEAD and (remote.key, first - 1 - before) in self._blocks:
            before += 1
        requested = self.request(remote, first, max(last, min(last + before, end - 1)))
        try:
            return [block.result() for block in requested[: last - first + 1]]
        except OSError:
            with self._lock:
                for key, block in list(self._blocks.items()):
                    if block in requested:
                        del self._blocks[key]
            raise

    def request(
        self, remote: Object, first: int, last: int
    ) -> list[concurrent.futures.Future[bytes]]:
        """Requests those blocks of a file from the `first` to the `last` that exist."""
        requested = []
        with self._lock:
            for number in range(first, min(last, remote.last_block) + 1):
                key = (remote.key, number)
                if key not in self._blocks:
                    start = number * BLOCK_BYTES
                    stop = min(start + BLOCK_BYTES, remote.num_bytes)
                    self._blocks[key] = self._pool.submit(remote.read, start, stop)
                self._blocks.move_to_end(key)
                requested.append(self._blocks[key])
            while len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)
        return requested

    def forget(self) -> None:
        """Drops all blocks, and the answers to requests under way."""
        with self._lock:
            self._blocks.clear()


class _Reader(io.RawIOBase):
    def __init__(
        self, remote: Object, blocks: Blocks, until: int | None = None
    ) -> None:
        self._remote, self._blocks, self._at = remote, blocks, 0
        self._end = remote.num_bytes if until is None else until

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        ends = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._at,
            os.SEEK_END: self._end,
        }
        self._at = max(0, ends[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        # Large reads are parts of what is kept, so that their own blocks stay in it.
        most = min(len(into), _MAX_AHEAD * BLOCK_BYTES)
        stop = min(self._at + most, self._end)
        if stop <= self._at:
            return 0
        first, last = self._at // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        end = -(-self._end // BLOCK_BYTES)
        content = b"".join(self._blocks.get(self._remote, first, last, end))
        num_bytes, begin = stop - self._at, self._at - first * BLOCK_BYTES
        into[:num_bytes] = content[begin : begin + num_bytes]
        self._at = stop
        return num_bytes


def opened(remote: Object, until: int | None = None) -> BinaryIO:
    """The file open for reading, seekable, up to `until`."""
    return io.BufferedReader(_Reader(remote, _blocks(), until), _BUFFER_BYTES)


def read_ahead(remote: Object, start: int, stop: int) -> None:
    """Requests the bytes from `start` to `stop` before they are read, up to a limit."""
    first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
    _blocks().request(remote, first, min(last, first + _MAX_REQUESTED - 1))


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
