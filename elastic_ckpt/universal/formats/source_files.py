"""Files of checkpoints of other programs: opened, and read whole or in parts.

A file is a regular one, since reading a pipe would not end. JSON has no name twice.
"""

from __future__ import annotations

import bisect
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import IO, Any, TypeGuard

from etils import epath

from elastic_ckpt.core import bucket_clients, storage
from elastic_ckpt.universal.formats.format_error import FormatError

# The most of a file that has the name of another.
MOST_NAME_BYTES = 1000
# Reading so many bytes costs less than another request.
GAP_BYTES = 64 << 10
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def opened(path: epath.PathLike) -> IO[bytes]:
    """The file, open for reading.

    Args:
      path: local, or in a bucket; it may be a link.

    Raises:
      FormatError: if it is missing, or no regular file.
    """
    try:
        if storage.is_local(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path} is no regular file; copy the whole checkpoint")
        return epath.Path(path).open("rb")
    except (FileNotFoundError, IsADirectoryError):
        raise FormatError(f"{path} is missing; copy the whole checkpoint") from None


def read(path: epath.PathLike, *, most_bytes: int | None = None) -> bytes:
    """The content of a file.

    Args:
      path: local, or in a bucket.
      most_bytes: the limit; None if there is none.

    Raises:
      FormatError: if the file is missing, or larger.
    """
    with opened(path) as file:
        num_bytes = file.seek(0, 2)
        if most_bytes is not None and num_bytes > most_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes, and at most {most_bytes} are read"
            )
        file.seek(0)
        return file.read(num_bytes)


def is_plain_name(name: object) -> TypeGuard[str]:
    """Whether a value is the name of a file that leads to no other directory."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def read_json(path: epath.PathLike) -> dict[str, Any]:
    """The JSON object that a file holds.

    Args:
      path: local, or in a bucket.

    Raises:
      FormatError: if the file is missing, or as `parse_json`.
    """
    return parse_json(read(path), str(path))


def parse_json(content: bytes, place: str) -> dict[str, Any]:
    """The JSON object that `content` is.

    Args:
      content: UTF-8.
      place: the file, and the place in it, for messages.

    Raises:
      FormatError: if it is no JSON object, or has a name twice.
    """
    try:
        fields = json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place} is no valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise FormatError(f"{place} is no JSON object")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has a name twice")
    return fields


class ByteWindows:
    """Many small parts of a file, in memory.

    Checkpoints with a header for each tensor need a few hundred bytes at many places.
    Near parts are read together, and those of a file in a bucket by parallel requests.

    Args:
      path: local, or in a bucket.
      spans: the first byte and the byte after the last of each part.
    """

    def __init__(self, path: epath.PathLike, spans: Sequence[tuple[int, int]]) -> None:
        merged = merged_spans(spans, gap_bytes=GAP_BYTES)
        self._starts = [start for start, _ in merged]
        self._parts = _read_spans(os.fspath(path), merged)

    def read(self, start: int, size: int) -> bytes:
        """Bytes from `start` on; fewer if the part that has the first ends before."""
        number = bisect.bisect_right(self._starts, start) - 1
        if number < 0 or size < 0:
            return b""
        at = start - self._starts[number]
        return self._parts[number][at : at + size]


def merged_spans(
    spans: Iterable[tuple[int, int]], *, gap_bytes: int = 0
) -> list[tuple[int, int]]:
    """Ranges of bytes in their order, joined where gaps have no more bytes."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start - merged[-1][1] <= gap_bytes:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _read_spans(path: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    if storage.is_local(path):
        with open(path, "rb") as file:
            return [os.pread(file.fileno(), b - a, a) for a, b in spans]
    system, name = bucket_clients.opened(path)
    starts, stops = [a for a, _ in spans], [b for _, b in spans]
    return list(system.cat_ranges([name] * len(spans), starts, stops, on_error="raise"))
