"""Cursors: each logical shard's position in its pipeline, in files by shard range.

A host saves consecutive shards in one file, such as `shards-00000-00011.json.gz`
(`FORMAT.md`). The file names contain the ranges, so a host reads only the files with
its own shards, no matter which host wrote them.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, errors, storage

VERSION = 1
# Fields that mark nested states: an older cursor, from which documents are reread, and
# the states from which rows reread the documents that they hold.
HELD, FROM = "documents held by", "documents read from"
_NAME = re.compile(r"shards-(\d{5,})-(\d{5,})\.json\.gz")

Cursor = storage.Json
Cursors = Mapping[int, Cursor]
Position = dict[str, storage.Json]


def write(directory: epath.PathLike, cursors: Cursors, position: Position) -> None:
    """Writes the cursors of a host, one file per run of consecutive shards."""
    for shards in runs(sorted(cursors)):
        name = f"shards-{shards[0]:05d}-{shards[-1]:05d}.json.gz"
        values = [cursors[shard] for shard in shards]
        content = checked_json.to_bytes(
            {"position": position, "cursors": values}, version=VERSION
        )
        # Without a timestamp, identical content has identical bytes.
        compressed = gzip.compress(content, mtime=0)
        storage.write_atomic(epath.Path(directory) / name, compressed)


def read(
    directory: epath.PathLike, shards: Iterable[int], position: Position
) -> dict[int, storage.Json]:
    """Reads the cursors of `shards` that hosts wrote into `directory` at `position`.

    Raises:
      DataError: if a shard is missing, or a file is unreadable or belongs to a
        different position.
    """
    required = set(shards)
    values_by_shard: dict[int, storage.Json] = {}
    for path in epath.Path(directory).iterdir():
        name = _NAME.fullmatch(path.name)
        first, last = map(int, name.groups()) if name else (0, -1)
        in_file = required.intersection(range(first, last + 1))
        if not in_file:
            continue
        content = checked_json.read(path, what="shard cursors", version=VERSION)
        values = content["cursors"]
        if content["position"] != position or len(values) != last + 1 - first:
            raise errors.DataError(
                f"the shard cursors in {path} are for position {content['position']}"
                f" and {len(values)} shards, but position {position} and the shards"
                f" {first} to {last} are needed: the file is from a different step;"
                " restore it from a good copy"
            )
        values_by_shard |= {shard: values[shard - first] for shard in in_file}
    missing = sorted(required - values_by_shard.keys())
    if missing:
        step = epath.Path(directory).parent
        raise errors.DataError(
            f"{directory} lacks {len(missing)} of {len(required)} logical shards:"
            f" {missing}; restore their files from a good copy, or move {step} out of"
            " its parent directory to continue from the previous step"
        )
    return values_by_shard


def states(cursor: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in a cursor: the state of each transformation of a pipeline.

    Skips older cursors inside the cursor, and all but the last of the states from which
    rows read their documents.
    """
    if isinstance(cursor, dict):
        yield cursor
        cursor = [
            value[-1] if key == FROM else value
            for key, value in cursor.items()
            if key != HELD
        ]
    if isinstance(cursor, list):
        for value in cursor:
            yield from states(value)


def runs(shards: Iterable[int]) -> list[list[int]]:
    """Splits ascending shard numbers into runs of consecutive numbers."""
    numbers = np.fromiter(shards, np.int64)
    begins = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [run.tolist() for run in np.split(numbers, begins) if run.size]
