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
# Fields of a mixture's state: elements taken, and states, by dataset.
TAKEN, PARTS = "taken", "parts"
# Fields of a cursor.
ROW, STATE, ENDED = "row", "state", "ended"
# The field of a part with its cursors, keyed by shard.
CURSORS = "cursors"
_NAME = re.compile(r"shards-(\d{5,})-(\d{5,})\.json\.gz")

Cursor = storage.Json
Cursors = Mapping[int, Cursor]
Position = dict[str, storage.Json]
# A host's state: the position, the same on every host, and the host's cursors.
HostState = tuple[Position, Cursors]


def write(directory: epath.PathLike, cursors: Cursors, position: Position) -> None:
    """Writes the cursors of a host, one file per run of consecutive shards."""
    for shards in runs(sorted(cursors)):
        name = f"shards-{shards[0]:05d}-{shards[-1]:05d}.json.gz"
        part = to_part({shard: cursors[shard] for shard in shards}, position)
        content = checked_json.to_bytes(part, version=VERSION)
        # Without a timestamp, identical content has identical bytes.
        storage.write_atomic(
            epath.Path(directory) / name, gzip.compress(content, mtime=0)
        )


def to_part(cursors: Cursors, position: Position) -> dict[str, storage.Json]:
    """The part of a data state with some cursors."""
    by_name = {str(shard): cursor for shard, cursor in cursors.items()}
    return {"position": position, CURSORS: by_name}


def joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Joins parts of one data state: their fields, and the newest cursor of each shard.

    Args:
      parts: the fields of each part, keyed by its name in error messages.

    Raises:
      DataError: if parts have different values of a field, such as the position.
    """
    fields: dict[str, Any] = {}
    for name, part in parts.items():
        for key, value in part.items():
            if key != CURSORS and fields.setdefault(key, value) != value:
                raise errors.DataError(
                    f"{name} has {key} {value!r:.200}, but {next(iter(parts))} has"
                    f" {fields[key]!r:.200}; load all parts of a data state from the"
                    " same step"
                )
    return fields | {CURSORS: newest(part.get(CURSORS, {}) for part in parts.values())}


def newest(several: Iterable[Mapping[Any, Any]]) -> dict[int, Cursor]:
    """The newest cursor of each shard among those of several hosts or workers.

    A cursor is newer the more rows the shard had yielded. At the same row, its end is
    newer than a restart point, which is newer than no cursor.
    """
    found: dict[int, Any] = {}
    for number, cursor in ((n, each[n]) for each in several for n in each):
        found[int(number)] = max(
            found.get(int(number)),
            cursor,
            key=lambda one: (row_of(one), one is not None, ENDED in (one or ())),
        )
    return found


def read(
    directory: epath.PathLike, shards: Iterable[int], position: Position
) -> dict[int, Cursor]:
    """Reads the cursors of `shards` that hosts wrote into `directory` at `position`.

    Raises:
      DataError: if a shard is missing, or a file is unreadable or belongs to a
        different position.
    """
    required = set(shards)
    parts: dict[str, Any] = {"the data state": {"position": position}}
    for path in epath.Path(directory).iterdir():
        name = _NAME.fullmatch(path.name)
        first, last = map(int, name.groups()) if name else (0, -1)
        if not required.isdisjoint(range(first, last + 1)):
            parts[str(path)] = checked_json.read(
                path, what="shard cursors", version=VERSION
            )
    remedy = (
        "restore their files from a good copy, or move"
        f" {epath.Path(directory).parent} out of its parent directory to continue from"
        " the previous step"
    )
    return chosen(joined(parts)[CURSORS], required, str(directory), remedy)


def chosen(
    held: Cursors,
    shards: Iterable[int],
    where: str = "the state",
    remedy: str = "load the states of all ranks together, as a list",
) -> dict[int, Cursor]:
    """The cursors of `shards`; raises a DataError if some are not among those held."""
    required = [*shards]
    missing = sorted(set(required) - held.keys())
    if missing:
        raise errors.DataError(
            f"{where} lacks {len(missing)} of {len(required)} logical shards:"
            f" {missing}; {remedy}"
        )
    return {shard: held[shard] for shard in required}


def row_of(cursor: Any) -> int:
    """The number of rows that a shard had yielded at a cursor."""
    return cursor[ROW] if cursor else 0


def state_of(cursor: Any) -> storage.Json:
    """The state of a shard's pipeline at a cursor, as JSON; None at its beginning."""
    return cursor.get(STATE, cursor.get(ENDED)) if cursor else None


def states(
    cursor: Any, *, oldest: bool = False, dataset: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects in a cursor, outermost first, each with its dataset's name.

    An object is the state of a transformation. The name is empty outside mixtures and
    `outer/inner` in a nested mixture.

    Args:
      cursor: the cursor, or the state of a pipeline.
      oldest: where rows reread documents from several states, and where an older cursor
        is inside this one, whether to yield only the oldest, which may belong to an
        earlier stage. By default, only the newest is yielded.
      dataset: the name of the dataset that the cursor belongs to.
    """
    inside: list[tuple[str, Any]] = []
    if isinstance(cursor, dict):
        cursor = cursor.get(HELD, cursor) if oldest else cursor
        yield dataset, cursor
        if TAKEN in cursor and PARTS in cursor:
            parts = cursor[PARTS].items()
            inside = [(f"{dataset}/{part}".lstrip("/"), each) for part, each in parts]
        else:
            inside = [
                (dataset, each[0 if oldest else -1] if key == FROM else each)
                for key, each in cursor.items()
                if key != HELD
            ]
    elif isinstance(cursor, list | tuple):
        inside = [(dataset, each) for each in cursor]
    for name, each in inside:
        yield from states(each, oldest=oldest, dataset=name)


def runs(shards: Iterable[int]) -> list[list[int]]:
    """Splits ascending shard numbers into runs of consecutive numbers."""
    numbers = np.fromiter(shards, np.int64)
    begins = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [run.tolist() for run in np.split(numbers, begins) if run.size]
