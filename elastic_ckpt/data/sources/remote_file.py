"""Files in object stores: read ahead in blocks, by parallel ranged requests.

The readers of a process share the blocks that were used last, so a file that is opened
again is read on from there. Blocks are of one version of a file. Each block of a file
that is in memory before the one that is read has one more block requested ahead, up to
a limit: a reader that goes through a file has many requests on their way, unless others
need the memory, and one that jumps about requests little that it needs not. Bytes that
will be read next are requested before (`read_ahead`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import io
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from fsspec import spec

from elastic_ckpt.core import bucket_clients, digest, storage, working_directory
from elastic_ckpt.data.sources import kept

BLOCK_BYTES = 2 * 2**20
# The memory of all blocks, and the most of them ahead of a reader.
_BUDGET_BYTES = 128 * BLOCK_BYTES
_MAX_AHEAD = 16
# The most blocks that are requested for one that will be read.
_MAX_REQUESTED = 4
# The most requests on their way at a time.
_REQUESTS = 16
_BUFFER_BYTES = 64 * 1024
# The most bytes of one read.
_MOST_BYTES = _MAX_AHEAD * BLOCK_BYTES

_BLOCKS: kept.Kept[bytes] = kept.Kept(lambda: _BUDGET_BYTES, len)


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

    def key(self, block: int) -> tuple[str, str, int, int]:
        """Equal for a block of equal objects."""
        return self.url, self.version, self.num_bytes, block

    def request(self, first: int, last: int) -> list[concurrent.futures.Future[bytes]]:
        """Requests those blocks from the `first` to the `last` that exist."""
        end = -(-self.num_bytes // BLOCK_BYTES)
        return [
            _BLOCKS.get(
                self.key(block),
                functools.partial(self._read, block),
                submit=_pool().submit,
                num_bytes=BLOCK_BYTES,
            )
            for block in range(first, min(last + 1, end))
        ]

    def _read(self, block: int) -> bytes:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.num_bytes)
        with store_errors():
            content = self.system.cat_file(self.path, start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(
                errno.EIO,
                f"{len(content)} bytes instead of {stop - start} from byte {start} on",
            )
        return content


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Converts errors of the clients of object stores to an OSError with an `errno`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except bucket_clients.failures() as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class _File(spec.AbstractBufferedFile):
    # A file up to an offset; what is kept are the blocks of the process.
    def __init__(self, remote: Object, until: int) -> None:
        super().__init__(remote.system, remote.path, size=until, cache_type="none")
        self._remote = remote

    def _fetch_range(self, start: int, end: int) -> bytes:
        # Large reads are parts of what is kept, so that their own blocks stay in it.
        remote, end = self._remote, min(end, self.size, start + _MOST_BYTES)
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        before = 0
        while before < _MAX_AHEAD and remote.key(first - 1 - before) in _BLOCKS:
            before += 1
        most = (self.size - 1) // BLOCK_BYTES
        requested = remote.request(first, max(last, min(last + before, most)))
        blocks = [block.result() for block in requested[: last - first + 1]]
        begin = first * BLOCK_BYTES
        return b"".join(blocks)[start - begin : end - begin]


def opened(remote: Object, until: int | None = None) -> BinaryIO:
    """The file open for reading, seekable, up to `until`."""
    file: Any = _File(remote, remote.num_bytes if until is None else until)
    return io.BufferedReader(file, _BUFFER_BYTES)


def read_ahead(remote: Object, start: int, stop: int) -> None:
    """Requests the bytes from `start` to `stop` before they are read, up to a limit."""
    first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
    remote.request(first, min(last, first + _MAX_REQUESTED - 1))


@functools.cache
def copied(remote: Object) -> str:
    """The path of a copy on this machine, for readers that need one.

    It is made once in each process, and ends with it; that of a killed process ends
    with the next start (`core.working_directory`).

    Raises:
      OSError: if it cannot be read, or this machine has no room for it.
    """
    identity = f"{remote.url} {remote.version} {remote.num_bytes}"
    name = f"{digest.name_hash(identity):016x}-{os.path.basename(remote.path)}"
    with _making:
        path = os.path.join(_directory()[0], name)
    with (
        opened(remote) as stream,
        storage.atomic_path(path) as temporary,
        open(temporary, "wb") as file,
    ):
        shutil.copyfileobj(stream, file, _MOST_BYTES)
    return path


_making = threading.Lock()


@functools.cache
def _directory() -> tuple[str, working_directory.WorkingDirectory]:
    # The directory ends with the object.
    path = working_directory.new_path()
    return path, working_directory.WorkingDirectory(path)


def forget() -> None:
    """Drops all blocks of this process, after a file has changed."""
    _BLOCKS.begin()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        _REQUESTS, thread_name_prefix="remote-file"
    )


# A forked process has none of the threads that answer the requests.
os.register_at_fork(after_in_child=_pool.cache_clear)
