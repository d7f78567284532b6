"""Copies on this machine of files in object stores, for readers that need a path.

They are made by parallel ranged requests, once in each process, and end with it; those
of a killed process end with the next start (`core.working_directory`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading

from elastic_ckpt.core import digest, storage, working_directory
from elastic_ckpt.data.sources import remote_file

_PART_BYTES = 8 * 2**20
_REQUESTS = 16


class FileCopies:
    """The copies of this process, in a separate directory."""

    def __init__(self) -> None:
        self._path = working_directory.new_path()
        # Kept: the directory ends with it.
        self._directory = working_directory.WorkingDirectory(self._path)
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def path(self, remote: remote_file.Object) -> str:
        """The path of the copy of a version of a file, made at the first call.

        Raises:
          OSError: if it cannot be read, or this machine has no room for it.
        """
        identity = f"{remote.url} {remote.version} {remote.num_bytes}"
        name = f"{digest.name_hash(identity):016x}-{os.path.basename(remote.path)}"
        path = os.path.join(self._path, name)
        with self._lock:
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            if not os.path.exists(path):
                _copy(remote, path)
        return path


def _copy(remote: remote_file.Object, path: str) -> None:
    with storage.atomic_path(path) as temporary, open(temporary, "r+b") as file:
        file.truncate(remote.num_bytes)

        def copy(start: int) -> None:
            stop = min(start + _PART_BYTES, remote.num_bytes)
            part = memoryview(remote.read(start, stop))
            while part:
                written = os.pwrite(file.fileno(), part, stop - len(part))
                part = part[written:]

        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            for _ in pool.map(copy, range(0, remote.num_bytes, _PART_BYTES)):
                pass


@functools.cache
def of_process() -> FileCopies:
    """The copies of this process."""
    return FileCopies()
