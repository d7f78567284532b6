"""Where the blocks of a file begin, for formats that do not say so themselves.

Finding the blocks takes a pass over the file, which also digests it. It is made once
for each version of a file: the result is cached below `$XDG_CACHE_HOME/elastic_ckpt`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage
from elastic_ckpt.data.sources import files, source

_VERSION = 1
_BUFFER_BYTES = 256 * 1024
# The blocks that follow each other.
_RUN_BLOCKS = 8


class Offsets(NamedTuple):
    """What a pass over a file finds.

    Attributes:
      start: the offset of each block.
      num_records: the number of its records.
      content: a digest of the file, or of what shows a change of it.
    """

    start: list[int]
    num_records: list[int]
    content: str


# The offsets of the records in a file that is open for reading, of so many bytes.
Walk: TypeAlias = Callable[[BinaryIO, int], Iterable[int]]


def index(kind: str, file: str, walk: Walk) -> source.FileIndex:
    """The index of a file by a walk over its records, which digests all of it.

    Some blocks follow each other in any order of the data: a file in an object store is
    read in larger ones.

    Args:
      kind: of the file: a directory of the cache.
      file: its path or URI.
      walk: makes the pass.
    """
    index = of_blocks(kind, file, functools.partial(_walked, file, walk))
    is_chained = np.arange(len(index.block_records)) % _RUN_BLOCKS > 0
    return dataclasses.replace(index, is_chained=is_chained)


def of_blocks(kind: str, file: str, find: Callable[[], Offsets]) -> source.FileIndex:
    """The index of a file whose blocks are from the cache, or from a pass over it."""
    content = files.content(file)
    path = _path(kind, file, content)
    found = _kept(path)
    if found is None:
        found = find()
        if content.version:
            _keep(path, found)
    return source.FileIndex(
        content=content.including(found.content),
        block_records=np.array(found.num_records, np.int64),
        block_bytes=np.array(found.start, np.int64),
    )


def _walked(file: str, walk: Walk) -> Offsets:
    start: list[int] = []
    counts: list[int] = []
    with files.opened(file) as opened:
        num_bytes = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        digested = _Digested(opened)
        for offset in walk(io.BufferedReader(digested, _BUFFER_BYTES), num_bytes):
            if (
                not start
                or counts[-1] == source.BLOCK_RECORDS
                or offset >= start[-1] + source.BLOCK_BYTES
            ):
                start.append(offset)
                counts.append(0)
            counts[-1] += 1
        digested.seek(num_bytes)
    return Offsets(start, counts, digested.hexdigest())


class _Digested(io.RawIOBase):
    # Digests each byte that is read, or passed over, for the first time.
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._done = file, digest.values_hash(), 0

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = self._file.seek(offset, whence)
        self._file.seek(self._done)
        while self._done < place and self.read(min(_BUFFER_BYTES, place - self._done)):
            pass
        return self._file.seek(place)

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        begin = self._file.tell()
        content = self._file.read(len(into))
        into[: len(content)] = content
        self._digest.update(content[max(0, self._done - begin) :])
        self._done = max(self._done, begin + len(content))
        return len(content)


def _kept(path: epath.Path) -> Offsets | None:
    try:
        fields = checked_json.read(path, what="index", version=_VERSION)
        start, num_records = (
            np.array(fields[name], np.int64).tolist()
            for name in ("start", "num_records")
        )
        found = Offsets(start, num_records, str(fields["content"]))
        return found if len(start) == len(num_records) else None
    except (errors.DataError, OSError, KeyError, ValueError, TypeError):
        return None


def _path(kind: str, file: str, content: files.Content) -> epath.Path:
    # A file with another version or digest has another cache entry.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.path.abspath(file) if storage.is_local(file) else file
    limits = [source.BLOCK_RECORDS, source.BLOCK_BYTES]
    name = digest.json_digest([place, *limits, *dataclasses.astuple(content)])
    return epath.Path(root) / "elastic_ckpt" / kind / f"{name}.json"


def _keep(path: epath.Path, found: Offsets) -> None:
    try:
        storage.write_atomic(
            path, checked_json.to_bytes(found._asdict(), version=_VERSION)
        )
    except OSError:
        # Without the cache the next start makes another pass over the file.
        return
