"""Sources: files of records that are read unit by unit.

A source knows its files. An index says how many records each block of a file has: a row
group of Parquet, a range of records elsewhere. Blocks, or parts of them, are the units
that shards read (`data.units`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files

# A record: its columns by name.
Element = dict[str, Any]

# Records of a block, where the format has none of its own.
BLOCK_RECORDS = 1024
# Files of which a fingerprint keeps every name; more are folded into groups.
_MAX_NAMED = 1024
_INDEX_THREADS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileIndex:
    """What one file holds.

    Attributes:
      content: its size, and what its content looks like.
      block_records: records of each block, int64 `[blocks]`.
      block_bytes: where each block begins, for formats that have to know.
    """

    content: files.Content
    block_records: np.ndarray
    block_bytes: tuple[int, ...] = ()

    @property
    def num_records(self) -> int:
        """Records of the file."""
        return int(self.block_records.sum())


def blocks(num_records: int) -> np.ndarray:
    """The records of the blocks of a file whose format has none of its own."""
    starts = np.arange(0, num_records, BLOCK_RECORDS)
    return np.minimum(BLOCK_RECORDS, num_records - starts)


class Source(Protocol):
    """Files of one format. A frozen value that survives cloudpickle."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths or URIs, in order."""

    def settings(self) -> dict[str, storage.Json]:
        """The format, and what is read of a record."""

    def index(self, file: str) -> FileIndex:
        """Reads the index of one file.

        Raises:
          DataError: if it is not a whole file of this format.
        """

    def read(self, unit: units.Unit, skip: int) -> Iterator[Read]:
        """The records of `unit` in order, but for the first `skip`.

        A `CorruptError` takes the place of records that are not what was written. Which
        records these are must not depend on `skip`.

        Raises:
          DataError: if the file cannot be read, after several tries.
        """


class CorruptError(errors.DataError):
    """Records that are not what was written.

    Attributes:
      num_records: how many.
    """

    def __init__(self, message: str, *, num_records: int) -> None:
        super().__init__(message)
        self.num_records = num_records


# What reading gives in the place of each record, or of several corrupt ones.
Read: TypeAlias = Element | CorruptError


def corrupt(place: str, problem: object, *, num_records: int = 1) -> CorruptError:
    """The error of `num_records` records that begin at `place`."""
    return CorruptError(
        f"{place}: corrupt ({problem}); restore the file from a copy, or set"
        " corrupt_records=skip, which is Reading(skip_corrupt=True), to leave such"
        " records out and count them",
        num_records=num_records,
    )


def take_names(of: Any, **fields: str) -> None:
    """Makes tuples of the fields of a source that a caller may have given as lists.

    Args:
      of: the source, in its construction.
      **fields: the fields by whether they are `required` or `optional`.

    Raises:
      ConfigError: as `files.names` says.
    """
    for kind, field in fields.items():
        what = f"{type(of).__name__}: {field}"
        taken = files.names(getattr(of, field), of=what, required=kind == "required")
        object.__setattr__(of, field, taken)


@functools.lru_cache(maxsize=256)
def indexes(source: Source) -> tuple[FileIndex, ...]:
    """The index of each file, read once a process.

    Raises:
      DataError: if a file is not of the source's format, or no file holds a record.
    """

    def read(file: str) -> FileIndex:
        return files.retried(lambda: source.index(file), file, at_start=True)

    workers = min(_INDEX_THREADS, len(source.files))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = tuple(pool.map(read, source.files))
    if not any(index.num_records for index in found):
        raise errors.DataError(
            f"{', '.join(source.files)}: not one record; write them again"
        )
    return found


def num_records(source: Source) -> int:
    """Records of an epoch."""
    return sum(index.num_records for index in indexes(source))


@functools.lru_cache(maxsize=256)
def cut(source: Source, num_shards: int) -> units.Units:
    """The units of `source` for so many shards."""
    return units.cut([i.block_records for i in indexes(source)], num_shards)


def identity(source: Source, *, sampled: bool = True) -> dict[str, storage.Json]:
    """What decides which record is where; of files the names, but not their place.

    Args:
      source: the files; if one has changed since it was indexed, all are indexed anew.
      sampled: whether a sample of their content is part of it.
    """
    found = indexes(source)
    if any(map(_has_changed, source.files, found)):
        files.forget_all()
        found = indexes(source)
    entries: list[storage.Json] = [
        _entry(file, index, sampled)
        for file, index in zip(source.files, found, strict=True)
    ]
    return {**source.settings(), "files": _folded(entries)}


def fingerprint(source: Source) -> str:
    """16 hex digits that stand for the identity."""
    return digest.json_digest(identity(source))[:16]


def tree(source: Source, *, max_files: int = 8) -> str:
    """The source in words, a line for each of its first files."""
    found = indexes(source)
    settings = source.settings()
    lines = [
        f"{settings.pop('format')}: {len(found):,} files,"
        f" {sum(len(i.block_records) for i in found):,} blocks,"
        f" {num_records(source):,} records, fingerprint {fingerprint(source)}"
    ]
    lines += [f"|-- {key}: {value}" for key, value in settings.items() if value]
    shown = list(zip(source.files, found, strict=True))[:max_files]
    lines += [
        f"|-- {os.path.basename(file)}: {index.content.num_bytes:,} bytes,"
        f" {len(index.block_records):,} blocks, {index.num_records:,} records"
        for file, index in shown
    ]
    if len(found) > len(shown):
        lines.append(f"|-- and {len(found) - len(shown):,} more")
    return "\n".join(lines)


files.remembers(indexes.cache_clear)
files.remembers(cut.cache_clear)


def _has_changed(file: str, index: FileIndex) -> bool:
    return files.has_changed(file, index.content.version)


def _entry(file: str, index: FileIndex, sampled: bool) -> list[storage.Json]:
    content = index.content
    blocks = digest.json_digest(index.block_records.tolist())[:8]
    entry: list[storage.Json] = [
        os.path.basename(file),
        content.num_bytes,
        index.num_records,
        blocks,
    ]
    return [*entry, content.sample] if sampled else entry


def _folded(entries: Sequence[Any]) -> list[storage.Json]:
    # A data state stays small, however many files there are.
    if len(entries) <= _MAX_NAMED:
        return list(entries)
    size = -(-len(entries) // _MAX_NAMED)
    groups = [entries[i : i + size] for i in range(0, len(entries), size)]
    return [
        [
            f"{group[0][0]} to {group[-1][0]}",
            sum(entry[1] for entry in group),
            sum(entry[2] for entry in group),
            digest.json_digest([entry[:4] for entry in group])[:8],
            *([digest.json_digest([e[4] for e in group])[:8]] if group[0][4:] else []),
        ]
        for group in groups
    ]
