"""A log of JSON lines in segments, for object stores, which cannot append.

A segment is an object with some of the lines; its name is its number, from 1:
`00000001.jsonl`. Each is uploaded once, by `sync` or when it is full, so the cost of a
sync and the writer's memory do not grow with the log. An upload is atomic: a crash
loses the lines since the last one, and leaves no incomplete line.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import storage

MAX_SEGMENT_BYTES = 2**20
_READERS = 16


class SegmentedLog:
    """Writes a new log; it has the methods of `storage.AppendLog`.

    Args:
      directory: of the segments, in an object store; this writer's alone.
      max_bytes: a segment that would exceed it is uploaded before the next line; a
        longer line is a segment.
    """

    def __init__(
        self, directory: epath.PathLike, *, max_bytes: int = MAX_SEGMENT_BYTES
    ) -> None:
        self._directory = storage.absolute(directory)
        self._max_bytes = max_bytes
        self._number = 1
        self._lines = bytearray()

    @property
    def pending_bytes(self) -> int:
        """The size of the lines in memory, which are not in a segment yet."""
        return len(self._lines)

    def append(self, record: Mapping[str, storage.Json]) -> None:
        """Adds `record` as one line."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if len(self._lines) + len(line) > self._max_bytes:
            self.sync()
        self._lines += line

    def sync(self) -> None:
        """Uploads the lines since the last segment; if that fails, they are kept.

        The next call tries again under the same name, as the failed upload may have
        reached the store.
        """
        if self._lines:
            path = self._directory / f"{self._number:08d}.jsonl"
            storage.write_atomic(path, bytes(self._lines))
            self._number += 1
            self._lines.clear()

    def close(self) -> None:
        """Uploads the lines that are left; a second call does nothing."""
        self.sync()


def read(directory: epath.PathLike) -> list[dict[str, Any]]:
    """The records of a log in order; none if there is no segment.

    Raises:
      DataError: if a segment was changed after it was written.
    """
    root = storage.absolute(directory)
    segments = sorted(root.glob("*.jsonl")) if root.exists() else []
    with concurrent.futures.ThreadPoolExecutor(_READERS) as executor:
        parts = executor.map(storage.read_log, segments)
        return [record for part in parts for record in part]
