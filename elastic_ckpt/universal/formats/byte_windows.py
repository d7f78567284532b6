"""Reads many small parts of a file at once.

Checkpoints with a header for each tensor need a few hundred bytes at many places. Near
parts are read together, and parts of a file in a bucket by parallel requests.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence

from etils import epath

from elastic_ckpt.core import storage

# Reading so many bytes costs less than another request.
GAP_BYTES = 64 << 10


class ByteWindows:
    """Parts of a file, in memory.

    Args:
      path: local, or in a bucket.
      spans: the first byte and the byte after the last of each part.
    """

    def __init__(self, path: epath.PathLike, spans: Sequence[tuple[int, int]]) -> None:
        merged = _merged(spans)
        self._starts = [start for start, _ in merged]
        self._parts = _read(os.fspath(path), merged)

    def read(self, start: int, size: int) -> bytes:
        """Bytes from `start` on; fewer if the part that has the first ends before."""
        number = bisect.bisect_right(self._starts, start) - 1
        if number < 0 or size < 0:
            return b""
        at = start - self._starts[number]
        return self._parts[number][at : at + size]


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start - merged[-1][1] <= GAP_BYTES:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _read(path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    if storage.is_local(path):
        with open(path, "rb") as file:
            return [os.pread(file.fileno(), b - a, a) for a, b in spans]
    # Imported only when needed: the import is slow.
    import fsspec

    system, name = fsspec.url_to_fs(path)
    starts, stops = [a for a, _ in spans], [b for _, b in spans]
    return list(system.cat_ranges([name] * len(spans), starts, stops, on_error="raise"))
