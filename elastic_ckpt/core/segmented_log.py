"""A log of JSON lines in segments, for object stores, which cannot append.

A segment is an object with some of the lines; its name is its number, from 1:
`00000001.jsonl`. Each is uploaded once, by `sync` or when it is full, so the cost of a
sync and the writer's memory do not grow with the log. An upload is atomic: a crash
loses the lines since the last one, and leaves no incomplete line.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from concurrent import futures
from typing import Any

from etils import epath

from elastic_ckpt.core import append_log, background, bucket_clients, storage

MAX_SEGMENT_BYTES = 2**20
_READERS = 16
# How long the training waits for an upload: other hosts wait for it.
_WAIT_SECS = 5.0


class SegmentedLog:
    """Writes a new log; it has the methods of `append_log.AppendLog`.

    While the store takes nothing, the lines stay in memory, and each new line tries
    again in the background.

    Args:
      directory: of the segments, in an object store; this writer's alone.
      max_bytes: a segment that would exceed it is uploaded before the next line; a
        longer line is a segment. A segment that is late has all lines until then.
      wait_secs: how long an upload may take before it is late.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        max_bytes: int = MAX_SEGMENT_BYTES,
        wait_secs: float = _WAIT_SECS,
    ) -> None:
        self._directory = storage.absolute(directory)
        self._max_bytes = max_bytes
        self._wait_secs = wait_secs
        self._number = 1
        self._lines = bytearray()
        # The upload under way, and how many bytes of the lines it has.
        self._uploading: tuple[futures.Future[None], int] | None = None
        # Why the newest upload is late.
        self._failure: Exception | None = None

    @property
    def pending_bytes(self) -> int:
        """The size of the lines in memory, which are not in a segment yet."""
        return len(self._lines)

    def append(self, record: Mapping[str, storage.Json]) -> None:
        """Adds `record` as one line; waits for an upload unless one is late.

        Raises:
          OSError: if the store takes nothing and memory is at its bound, or another of
            `bucket_clients.failures`.
        """
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        is_full = len(self._lines) + len(line) > self._max_bytes
        if self._lines and (self._failure or is_full):
            try:
                self._upload(0.0 if self._failure else self._wait_secs)
            except bucket_clients.failures():
                if len(self._lines) + len(line) > append_log.MOST_LATE_BYTES:
                    raise
        self._lines += line

    def sync(self) -> None:
        """Uploads the lines since the last segment; if that fails, they are kept.

        The next call tries again under the same name, as the failed upload may have
        reached the store.

        Raises:
          OSError: if the store does not take them, or not in time, or another of
            `bucket_clients.failures`.
        """
        self._upload_all(self._wait_secs)

    def close(self) -> None:
        """Uploads the lines that are left; a second call does nothing."""
        self._upload_all(None)

    def _upload_all(self, wait_secs: float | None) -> None:
        # An upload that was late has not all of them, and may have failed. The training
        # waits for it once.
        if self._uploading is not None:
            try:
                self._upload(None if wait_secs is None else 0.0)
            except bucket_clients.failures():
                if self._uploading is not None:
                    raise
        while self._lines:
            self._upload(wait_secs)

    def _upload(self, wait_secs: float | None) -> None:
        path = self._directory / f"{self._number:08d}.jsonl"
        if self._uploading is None:
            write = functools.partial(storage.write_atomic, path, bytes(self._lines))
            uploading = background.in_thread(write, name="step log")
            self._uploading = uploading, len(self._lines)
        uploading, num_bytes = self._uploading
        futures.wait([uploading], wait_secs)
        if not uploading.done():
            late = TimeoutError(f"the upload of {path} timed out; it goes on")
            self._failure = self._failure or late
            raise self._failure
        self._uploading = None
        try:
            uploading.result()
        except bucket_clients.failures() as error:
            self._failure = error
            raise
        self._failure = None
        self._number += 1
        del self._lines[:num_bytes]


def read(directory: epath.PathLike) -> list[dict[str, Any]]:
    """The records of a log in order; none if there is no segment.

    Raises:
      DataError: if a segment was changed after it was written.
    """
    root = storage.absolute(directory)
    segments = sorted(root.glob("*.jsonl")) if root.exists() else []
    with futures.ThreadPoolExecutor(_READERS) as executor:
        parts = executor.map(append_log.read, segments)
        return [record for part in parts for record in part]
