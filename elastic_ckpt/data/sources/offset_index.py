"""Where the blocks of a file begin, for formats that do not say so themselves.

Finding the blocks takes a pass over the file. It is made once for each version of a
file: the result is cached below `$XDG_CACHE_HOME/elastic_ckpt`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage
from elastic_ckpt.data.sources import files, source

_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Offsets:
    """The blocks of a file.

    Attributes:
      start: the offset of each block, int64 `[blocks]`.
      num_records: the number of its records, int64 `[blocks]`.
    """

    start: np.ndarray
    num_records: np.ndarray

    def file_index(self, content: files.Content) -> source.FileIndex:
        """The index of the file with this content."""
        return source.FileIndex(
            content=content,
            block_records=self.num_records,
            block_bytes=tuple(self.start.tolist()),
        )


def cached(
    kind: str, file: str, content: files.Content, walk: Callable[[], Offsets]
) -> Offsets:
    """The blocks of a file, from the cache or from a pass over it.

    Args:
      kind: of the file: a directory of the cache.
      file: its path or URI.
      content: its present size, sample and version.
      walk: makes the pass.
    """
    path = _path(kind, file, content)
    try:
        fields = checked_json.read(path, what="index", version=_VERSION)
        start, num_records = (
            np.array(fields[name], np.int64) for name in ("start", "num_records")
        )
        if len(start) == len(num_records):
            return Offsets(start=start, num_records=num_records)
    except (errors.DataError, OSError, KeyError, ValueError, TypeError):
        pass
    offsets = walk()
    if content.version:
        _keep(path, offsets)
    return offsets


def _path(kind: str, file: str, content: files.Content) -> epath.Path:
    # A file with another version or sample has another cache entry.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.path.abspath(file) if storage.is_local(file) else file
    name = digest.json_digest([place, *dataclasses.astuple(content)])
    return epath.Path(root) / "elastic_ckpt" / kind / f"{name}.json"


def _keep(path: epath.Path, offsets: Offsets) -> None:
    fields: dict[str, storage.Json] = {
        "start": offsets.start.tolist(),
        "num_records": offsets.num_records.tolist(),
    }
    content = checked_json.to_bytes(fields, version=_VERSION)
    try:
        storage.write_atomic(path, content)
    except OSError:
        # Without the cache the next start makes another pass over the file.
        return
