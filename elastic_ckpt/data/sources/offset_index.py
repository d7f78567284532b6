"""Where the blocks of a file begin, for formats that do not say so themselves.

Finding the blocks takes a pass over the file. It is made once for each version of a
file: the result is cached below `$XDG_CACHE_HOME/elastic_ckpt`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage
from elastic_ckpt.data.sources import files, source

_VERSION = 1


# The offset of each block, and the number of its records.
Offsets: TypeAlias = tuple[Sequence[int], Sequence[int]]


def index(
    kind: str, file: str, walk: Callable[[int], Offsets], *, is_whole: bool = False
) -> source.FileIndex:
    """The index of a file, whose blocks are from the cache or from a pass over it.

    Args:
      kind: of the file: a directory of the cache.
      file: its path or URI.
      walk: makes the pass over the file, given its size.
      is_whole: as in the index.
    """
    content = files.content(file)
    path = _path(kind, file, content)
    offsets = _kept(path)
    if offsets is None:
        offsets = walk(content.num_bytes)
        if content.version:
            _keep(path, offsets)
    start, num_records = (np.array(each, np.int64) for each in offsets)
    return source.FileIndex(
        content=content,
        block_records=num_records,
        block_bytes=tuple(start.tolist()),
        is_whole=is_whole,
    )


def _kept(path: epath.Path) -> Offsets | None:
    try:
        fields = checked_json.read(path, what="index", version=_VERSION)
        start, num_records = (
            np.array(fields[name], np.int64).tolist()
            for name in ("start", "num_records")
        )
        return (start, num_records) if len(start) == len(num_records) else None
    except (errors.DataError, OSError, KeyError, ValueError, TypeError):
        return None


def _path(kind: str, file: str, content: files.Content) -> epath.Path:
    # A file with another version or sample has another cache entry.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.path.abspath(file) if storage.is_local(file) else file
    name = digest.json_digest([place, *dataclasses.astuple(content)])
    return epath.Path(root) / "elastic_ckpt" / kind / f"{name}.json"


def _keep(path: epath.Path, offsets: Offsets) -> None:
    start, num_records = map(list, offsets)
    content = checked_json.to_bytes(
        {"start": start, "num_records": num_records}, version=_VERSION
    )
    try:
        storage.write_atomic(path, content)
    except OSError:
        # Without the cache the next start makes another pass over the file.
        return
