"""Append-only logs of JSON lines: a file on disk, or segments in an object store.

Objects cannot be appended to, so a log in a store is a directory of segments. A segment
name, such as `1795864500123456-5f3a9c21.jsonl`, consists of the upload time in
microseconds, which orders the lines, and the writer's ID. A segment is uploaded once,
by `sync` or when it is full. So the cost of a sync and the writer's memory do not grow
with the log, and concurrent writers do not overwrite each other's lines.

A crash can truncate only the last line of a file, and `read` drops that line; uploads
are atomic. While a disk is full or a store fails, lines wait in memory, and each new
line triggers another attempt.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent import futures
from typing import Any, BinaryIO, NamedTuple

from etils import epath

from elastic_ckpt.core import background, bucket_clients, clock, errors, storage

# Maximum number of bytes that wait in memory: 30,000 steps of a large batch.
MOST_LATE_BYTES = 64 * 2**20
MAX_SEGMENT_BYTES = 2**20
# How much of a log's end is searched for the last whole line.
_MOST_LINE_BYTES = 2**24
# How many segments are read if only the end of a log is needed.
_LAST_SEGMENTS = 128
_READERS = 16
# How long training waits for an upload, while other hosts wait for training.
_WAIT_SECS = 5.0
# How long training waits for all uploads when it ends.
_CLOSE_SECS = 600.0


class JsonLog(abc.ABC):
    """A log that is open for writing; see `writer`."""

    def __init__(self) -> None:
        self._lines = bytearray()

    @property
    def late_bytes(self) -> int:
        """How many bytes of lines are neither on disk nor in a store yet."""
        return len(self._lines)

    def append(self, record: Mapping[str, storage.Json]) -> None:
        """Adds `record` as one line; waits for an upload unless one is late.

        Raises:
          OSError: if writing fails and more than `MOST_LATE_BYTES` are waiting; or any
            other of `bucket_clients.failures`.
        """
        self._lines += _line(record)
        try:
            self._take()
        except bucket_clients.failures():
            if len(self._lines) > MOST_LATE_BYTES:
                raise

    def check(self) -> None:  # noqa: B027
        """Checks that the file exists, because a write to a removed file does not fail.

        Raises:
          RunError: if the file was removed or replaced.
        """

    def sync(self) -> None:
        """Makes all lines so far durable.

        Raises:
          OSError: if the write fails or takes too long; or any other of
            `bucket_clients.failures`. The next call tries again.
        """
        self._take(is_sync=True)

    @abc.abstractmethod
    def close(self) -> None:
        """Syncs and closes the log; a second call does nothing.

        Raises:
          OSError: if the sync fails or takes too long; or any other of
            `bucket_clients.failures`.
        """

    @abc.abstractmethod
    def _take(self, *, is_sync: bool = False) -> None: ...


def writer(
    path: epath.PathLike,
    *,
    max_bytes: int = MAX_SEGMENT_BYTES,
    wait_secs: float = _WAIT_SECS,
    close_secs: float = _CLOSE_SECS,
) -> JsonLog:
    """Opens a log for writing; an existing log continues after its last whole line.

    On a disk, the kernel has a line when `append` returns, so killing the process does
    not lose any line. After `sync`, the lines also survive a machine crash.

    Args:
      path: the file, or the directory of segments in an object store.
      max_bytes: the size at which a segment is uploaded; segments may be larger if an
        upload was late.
      wait_secs: how long an upload may take before it is late.
      close_secs: how long an upload may take in `close`.
    """
    if storage.is_local(path):
        return _File(path)
    return _Segments(path, max_bytes, wait_secs, close_secs)


class _File(JsonLog):
    def __init__(self, path: epath.PathLike) -> None:
        super().__init__()
        storage.make_directory(epath.Path(path).parent)
        self._path = os.fspath(path)
        # Unbuffered, because the state of a buffer is unknown after a failure.
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        _drop_torn_line(self._file)

    def check(self) -> None:
        if not (
            os.path.exists(self._path)
            and os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        ):
            raise errors.RunError(
                f"{self._path} was removed or replaced while this run was writing to"
                " it. The lines written so far are lost, so the run stops; restart the"
                " run, and do not change its directory while it is running"
            )

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def _take(self, *, is_sync: bool = False) -> None:
        # A disk that fills up may accept only a part of the bytes.
        while self._lines:
            del self._lines[: self._file.write(self._lines)]
        if is_sync:
            os.fsync(self._file.fileno())


class _Upload(NamedTuple):
    # An upload in progress, and how many bytes of the lines it includes.
    done: futures.Future[None]
    path: epath.Path
    num_bytes: int


class _Segments(JsonLog):
    def __init__(
        self,
        directory: epath.PathLike,
        max_bytes: int,
        wait_secs: float,
        close_secs: float,
    ) -> None:
        super().__init__()
        self._directory = storage.absolute(directory)
        self._max_bytes, self._wait_secs = max_bytes, wait_secs
        self._close_secs = close_secs
        # A segment's number exceeds all existing numbers, because another machine's
        # clock may be ahead. A store's listings may also lag.
        newest = [path.name[:16] for path in _segments(self._directory)[-1:]]
        self._number = int(*newest)
        self._writer = secrets.token_hex(4)
        # Held while an upload begins or is settled, but not while threads wait for it.
        self._lock = threading.Lock()
        self._uploading: _Upload | None = None
        # Why the newest upload is late.
        self._failure: BaseException | None = None

    def close(self) -> None:
        while self._lines:
            self._upload(self._close_secs)

    def _take(self, *, is_sync: bool = False) -> None:
        while self._lines and (
            is_sync or self._failure or len(self._lines) >= self._max_bytes
        ):
            self._upload(0.0 if self._failure else self._wait_secs)

    def _upload(self, wait_secs: float) -> None:
        begun = self._begun()
        if begun is None:
            return
        uploading, path, num_bytes = begun
        futures.wait([uploading], wait_secs)
        with self._lock:
            # Another thread may also have waited for it.
            if self._uploading is begun and uploading.done():
                self._uploading, self._failure = None, uploading.exception()
                if not self._failure:
                    del self._lines[:num_bytes]
            elif self._uploading is begun:
                late = TimeoutError(f"the upload of {path} timed out, but continues")
                self._failure = self._failure or late
                raise self._failure
        uploading.result()

    def _begun(self) -> _Upload | None:
        # The upload in progress, or a new upload of all lines; None if there are no
        # lines.
        with self._lock:
            if self._uploading is None and self._lines:
                # A failed upload may have reached the store, so it keeps its name.
                if self._failure is None:
                    self._number = max(self._number + 1, clock.time_ns() // 1000)
                path = self._directory / f"{self._number:016d}-{self._writer}.jsonl"
                lines = bytes(self._lines)
                write = functools.partial(storage.write_atomic, path, lines)
                uploading = background.in_thread(write, name="log segment")
                self._uploading = _Upload(uploading, path, len(lines))
            return self._uploading


def create(path: epath.PathLike, record: Mapping[str, storage.Json]) -> bool:
    """Creates a log with its first line; returns False if it exists already."""
    is_file = storage.is_local(path)
    first = epath.Path(path) if is_file else epath.Path(path) / f"{0:016d}.jsonl"
    return storage.create(first, _line(record))


def read(
    path: epath.PathLike, *, last_bytes: int | None = None
) -> list[dict[str, Any]]:
    """The records of a log in order, without an incomplete last line.

    Args:
      path: the file, or the directory of segments.
      last_bytes: how much of the end of a file to read; for segments, any number reads
        only the newest ones. None reads everything.

    Raises:
      FileNotFoundError: if there is no log.
      DataError: if a line other than a file's last one is not a JSON object.
    """
    root = storage.absolute(path)
    if storage.is_local(root) and not root.is_dir():
        return _read_file(root, last_bytes)
    segments = _segments(root)
    if not segments:
        raise FileNotFoundError(f"{path} has no log segments")
    if last_bytes is not None:
        segments = segments[-_LAST_SEGMENTS:]
    with futures.ThreadPoolExecutor(_READERS) as executor:
        return [
            record for part in executor.map(_read_file, segments) for record in part
        ]


def _line(record: Mapping[str, storage.Json]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _read_file(path: epath.Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = 0 if last_bytes is None else max(0, end - last_bytes)
        file.seek(start)
        lines = file.read().split(b"\n")
    lines = lines[bool(start) :]  # without a partial first line
    # Text after the last newline is a line that a crash truncated.
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append({**json.loads(line)})
        except (TypeError, ValueError):
            raise errors.DataError(
                f"{path}, line {number}: not a JSON object, so the log must have"
                " been changed after it was written; restore the log from a good copy"
            ) from None
    return records


def _segments(directory: epath.Path) -> list[epath.Path]:
    # Names sort by number, because numbers have leading zeros.
    return sorted(directory.glob(f"{16 * '[0-9]'}*.jsonl"))


def _drop_torn_line(file: BinaryIO) -> None:
    # Otherwise, the next line would be appended to the incomplete line.
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, end - _MOST_LINE_BYTES))
    whole = start + file.read(end - start).rfind(b"\n") + 1
    if whole < end:
        file.truncate(whole)
