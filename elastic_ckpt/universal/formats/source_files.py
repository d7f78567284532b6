"""Files of checkpoints of other programs: opened, read up to a limit, and measured.

A file is a regular one, since reading a pipe would not end. Holes take no space, so
what is read of a file is bounded by the bytes that it has on disk. JSON is bounded in
memory, and has no name twice.
"""

from __future__ import annotations

import bisect
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TypeGuard

from etils import epath

from elastic_ckpt.core import bucket_clients, storage
from elastic_ckpt.universal.formats.format_error import FormatError

# The most of a file that has the name of another.
MOST_NAME_BYTES = 1000
# Reading so many bytes costs less than another request.
GAP_BYTES = 64 << 10
# Of JSON.
MOST_BYTES = 100 << 20
# Values of 64 bytes take less than 1 GiB; a tensor of a header has 13, one of Orbax 57.
MOST_VALUES = 12_000_000
# A list of many tensors may be larger: the tensors have more bytes than it has, and so
# many for each value of it.
_BYTES_PER_BYTE, _BYTES_PER_VALUE = 2, 16
# Lists of tensors that are no larger are within the limits.
_SMALL_BYTES = 12 << 20
# In memory every character of a text takes as much as its widest.
_MOST_WIDE_BYTES = 32 << 20
_WIDE = re.compile(rb"[\xc4-\xff]")
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


def num_stored_bytes(path: epath.PathLike, num_bytes: int | None = None) -> int:
    """The bytes of a file without its holes, which take no space; 0 of no file.

    Args:
      path: local, or in a bucket.
      num_bytes: its size; None if it is not known.
    """
    if not storage.is_local(path):
        return epath.Path(path).stat().length if num_bytes is None else num_bytes
    if not stat.S_ISREG(os.stat(path).st_mode):
        return 0
    stored = end = 0
    with open(path, "rb") as file:
        try:
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                stored += end - start
        except OSError as error:
            # There are no values behind `end`.
            if error.errno != errno.ENXIO:
                raise
    return stored


def num_stored_bytes_in(directory: epath.Path) -> int:
    """The bytes of all files in a directory, without their holes."""
    return sum(map(num_stored_bytes, _files(directory)))


def _files(directory: epath.Path) -> Iterator[epath.PathLike]:
    if storage.is_local(directory):
        # Links may lead back.
        for parent, _, names in os.walk(directory):
            yield from (os.path.join(parent, name) for name in names)
    else:
        for path in directory.rglob("*"):
            if not path.is_dir():
                yield path


def read(path: epath.PathLike, *, most_bytes: int) -> bytes:
    """The content of a file.

    Args:
      path: local, or in a bucket.
      most_bytes: the limit.

    Raises:
      FormatError: if the file is missing, larger, or has holes.
    """
    with opened(path) as file:
        num_bytes = file.seek(0, 2)
        if num_bytes > most_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes, and at most {most_bytes} are read"
            )
        if num_stored_bytes(path, num_bytes) < num_bytes:
            raise FormatError(
                f"{path} has holes, which no such file has; copy it again"
            )
        file.seek(0)
        return file.read(num_bytes)


def is_plain_name(name: object) -> TypeGuard[str]:
    """Whether a value is the name of a file that leads to no other directory."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def read_json(
    path: epath.PathLike, *, tensors: epath.Path | None = None
) -> dict[str, Any]:
    """The JSON object that a file holds.

    Args:
      path: local, or in a bucket.
      tensors: the directory of those that it lists, if it is large where they are.

    Raises:
      FormatError: if the file is missing or too large, or as `parse_json`.
    """
    most_bytes, most_values = MOST_BYTES, MOST_VALUES
    num_bytes = epath.Path(path).stat().length if tensors is not None else 0
    if tensors is not None and num_bytes > _SMALL_BYTES:
        stored_bytes = num_stored_bytes_in(tensors) - num_bytes
        most_bytes = max(most_bytes, stored_bytes // _BYTES_PER_BYTE)
        most_values = max(most_values, stored_bytes // _BYTES_PER_VALUE)
    content = read(path, most_bytes=most_bytes)
    return parse_json(content, str(path), most_values=most_values)


def parse_json(
    content: bytes, place: str, *, most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """The JSON object that `content` is.

    Args:
      content: UTF-8.
      place: the file, and the place in it, for messages.
      most_values: about as many values, names and parts of containers may it have.

    Raises:
      FormatError: if it is no JSON object, has a name twice, or too many values.
    """
    # A dict takes as much as four numbers, and a list as two. It has room for a few
    # names; others take as much as three.
    dicts = content.count(b"{")
    names = max(0, content.count(b":") - 4 * dicts)
    lists = content.count(b"[")
    values = content.count(b",") + 4 * dicts + 2 * lists + 3 * names
    if values > most_values:
        raise FormatError(
            f"{place} has about {values} values, and at most {most_values} are read"
        )
    if len(content) > _MOST_WIDE_BYTES and _WIDE.search(content):
        raise FormatError(
            f"{place} has {len(content)} bytes with characters that make it four times"
            f" as large, and at most {_MOST_WIDE_BYTES} of such are read"
        )
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
