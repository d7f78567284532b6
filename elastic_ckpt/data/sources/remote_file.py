"""Files in object stores: read ahead in ranges, by parallel requests.

A range is a fixed-size block of `RANGE_BYTES`. The readers of a process share a cache
of the most recently used ranges, each from one version of a file. The more consecutive
ranges before the current one are in the cache, the more ranges are requested ahead, up
to a limit. So a sequential reader has many requests in flight, unless other readers
need the memory, and a random reader requests few ranges that it does not need. Bytes
known to be read next can be requested early (`read_ahead`).
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

RANGE_BYTES = 2 * 2**20
# Maximum memory for all ranges, and maximum number of ranges ahead of a reader.
_BUDGET_BYTES = 128 * RANGE_BYTES
_MAX_AHEAD = 16
# Maximum number of ranges that `read_ahead` requests.
_MAX_REQUESTED = 4
# Maximum number of requests in flight.
_REQUESTS = 16
_BUFFER_BYTES = 64 * 1024
# Maximum number of bytes per read.
_MOST_BYTES = _MAX_AHEAD * RANGE_BYTES

_RANGES: kept.Kept[bytes] = kept.Kept(lambda: _BUDGET_BYTES, len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Object:
    """A file in an object store, as fsspec finds it.

    Attributes:
      url: the URI.
      version: a string that changes with each write; empty if the store has none.
      system: fsspec's file system.
      path: the path in the file system.
      num_bytes: the size.
    """

    url: str
    version: str
    system: Any = dataclasses.field(compare=False)
    path: str = dataclasses.field(compare=False)
    num_bytes: int

    def key(self, number: int) -> tuple[str, str, int, int]:
        """The cache key of range `number`."""
        return self.url, self.version, self.num_bytes, number

    def request(self, first: int, last: int) -> list[concurrent.futures.Future[bytes]]:
        """Requests ranges number `first` through `last`, up to the end of the file."""
        end = -(-self.num_bytes // RANGE_BYTES)
        return [
            _RANGES.get(
                self.key(number),
                functools.partial(self._read, number),
                submit=_pool().submit,
                num_bytes=RANGE_BYTES,
            )
            for number in range(first, min(last + 1, end))
        ]

    def _read(self, number: int) -> bytes:
        start = number * RANGE_BYTES
        stop = min(start + RANGE_BYTES, self.num_bytes)
        with store_errors():
            content = self.system.cat_file(self.path, start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(
                errno.EIO,
                f"got {len(content)} bytes instead of {stop - start} at byte {start}",
            )
        return content


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Converts errors from object store clients to an OSError with an `errno`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except bucket_clients.failures() as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class _File(spec.AbstractBufferedFile):
    # A file up to an offset, read through the process's cache.
    def __init__(self, remote: Object, until: int) -> None:
        super().__init__(remote.system, remote.path, size=until, cache_type="none")
        self._remote = remote

    def _fetch_range(self, start: int, end: int) -> bytes:
        # Limits large reads, so that their ranges do not evict each other.
        remote, end = self._remote, min(end, self.size, start + _MOST_BYTES)
        first, last = start // RANGE_BYTES, (end - 1) // RANGE_BYTES
        before = 0
        while before < _MAX_AHEAD and remote.key(first - 1 - before) in _RANGES:
            before += 1
        most = (self.size - 1) // RANGE_BYTES
        requested = remote.request(first, max(last, min(last + before, most)))
        contents = [each.result() for each in requested[: last - first + 1]]
        begin = first * RANGE_BYTES
        return b"".join(contents)[start - begin : end - begin]


def opened(remote: Object, until: int | None = None) -> BinaryIO:
    """Opens a seekable file for reading up to `until`."""
    file: Any = _File(remote, remote.num_bytes if until is None else until)
    return io.BufferedReader(file, _BUFFER_BYTES)


def read_ahead(remote: Object, start: int, stop: int) -> None:
    """Requests bytes from `start` to `stop` before they are read, up to a limit."""
    first, last = start // RANGE_BYTES, (stop - 1) // RANGE_BYTES
    remote.request(first, min(last, first + _MAX_REQUESTED - 1))


@functools.cache
def copied(remote: Object) -> str:
    """Copies the file to this machine, for readers that need a local path.

    Each process makes one copy and deletes it when it exits. If the process is killed,
    the next process to start deletes the copy (`core.working_directory`).

    Raises:
      OSError: if the file cannot be read or does not fit on this machine's disk.
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
    # The directory is deleted together with its `WorkingDirectory`.
    path = working_directory.new_path()
    return path, working_directory.WorkingDirectory(path)


def forget() -> None:
    """Drops all ranges that this process has cached, after a file has changed."""
    _RANGES.begin()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
        _REQUESTS, thread_name_prefix="remote-file"
    )


# A forked process does not have the threads that answer requests.
os.register_at_fork(after_in_child=_pool.cache_clear)
