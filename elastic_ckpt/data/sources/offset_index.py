"""Where the blocks of a file begin, for formats that do not say so themselves.

Finding the blocks takes a pass over the file, which also digests it. It is made once
for each version of a file: the result is cached below `$XDG_CACHE_HOME/elastic_ckpt`.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage
from elastic_ckpt.data.sources import files, source

_VERSION = 1
_BUFFER_BYTES = 256 * 1024
_CHUNK_BYTES = 2**20

# The offset of each block, and the number of its records.
Offsets: TypeAlias = tuple[Sequence[int], Sequence[int]]
Walk: TypeAlias = Callable[[BinaryIO, int], Offsets]


def index(
    kind: str,
    file: str,
    walk: Walk,
    *,
    is_whole: bool = False,
    digests_all: bool = True,
) -> source.FileIndex:
    """The index of a file, whose blocks are from the cache or from a pass over it.

    Args:
      kind: of the file: a directory of the cache.
      file: its path or URI.
      walk: makes the pass, given the file, open for reading, and its size.
      is_whole: as in the index.
      digests_all: whether the digest is of all of the file, or of what `walk` reads.
    """
    content = files.content(file)
    path = _path(kind, file, content)
    found = _kept(path)
    if found is None:
        found = _walked(file, content.num_bytes, walk, digests_all)
        if content.version:
            _keep(path, found)
    return source.FileIndex(
        content=content.including(found.digest),
        block_records=np.array(found.num_records, np.int64),
        block_bytes=tuple(found.start),
        is_whole=is_whole,
    )


class _Found(NamedTuple):
    start: Sequence[int]
    num_records: Sequence[int]
    digest: str


def _walked(file: str, num_bytes: int, walk: Walk, digests_all: bool) -> _Found:
    with files.opened(file) as opened:
        digested = _Digested(opened, reads_all=digests_all)
        # With a buffer, more would be read than `walk` asks for.
        buffered = io.BufferedReader(digested, _BUFFER_BYTES if digests_all else 1)
        offsets = walk(buffered, num_bytes)
        digested.seek(num_bytes)
        return _Found(*offsets, digested.hexdigest())


class _Digested(io.RawIOBase):
    # Digests each byte that is read, or passed over, for the first time.
    def __init__(self, file: BinaryIO, *, reads_all: bool) -> None:
        self._file, self._reads_all = file, reads_all
        self._digest, self._done = digest.values_hash(), 0

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._file.tell()
        if self._reads_all and offset > self._done:
            self._file.seek(self._done)
            while self._done < offset:
                content = self._file.read(min(_CHUNK_BYTES, offset - self._done))
                if not content:
                    break
                self._digest.update(content)
                self._done += len(content)
        return self._file.seek(offset)

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        begin = self._file.tell()
        content = self._file.read(len(into))
        into[: len(content)] = content
        fresh = content[max(0, self._done - begin) :]
        self._digest.update(fresh)
        self._done = max(self._done, begin + len(content))
        return len(content)


def _kept(path: epath.Path) -> _Found | None:
    try:
        fields = checked_json.read(path, what="index", version=_VERSION)
        start, num_records = (
            np.array(fields[name], np.int64).tolist()
            for name in ("start", "num_records")
        )
        found = _Found(start, num_records, str(fields["content"]))
        return found if len(start) == len(num_records) else None
    except (errors.DataError, OSError, KeyError, ValueError, TypeError):
        return None


def _path(kind: str, file: str, content: files.Content) -> epath.Path:
    # A file with another version or digest has another cache entry.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.path.abspath(file) if storage.is_local(file) else file
    name = digest.json_digest([place, *dataclasses.astuple(content)])
    return epath.Path(root) / "elastic_ckpt" / kind / f"{name}.json"


def _keep(path: epath.Path, found: _Found) -> None:
    content = checked_json.to_bytes(
        {
            "start": list(found.start),
            "num_records": list(found.num_records),
            "content": found.digest,
        },
        version=_VERSION,
    )
    try:
        storage.write_atomic(path, content)
    except OSError:
        # Without the cache the next start makes another pass over the file.
        return
