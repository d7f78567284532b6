"""Sources: files of records that are read unit by unit.

A source is a list of files. An index has the number of records in each block of a file:
a row group in Parquet, a range of records in other formats. Blocks, or parts of them,
are the units that shards read (`data.units`).
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files

T = TypeVar("T")

# A record: its columns by name.
Element = dict[str, Any]

# Records of a block in formats without blocks.
BLOCK_RECORDS = 1024
# The most files that a fingerprint lists by name; more are combined into groups.
_MAX_NAMED = 1024
_INDEX_THREADS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileIndex:
    """The index of one file.

    Attributes:
      content: its size, and a digest of as much of it as the format digests.
      block_records: records of each block, int64 `[blocks]`.
      block_bytes: the offset of each block, or none if they are not known.
      is_whole: whether blocks can only be read from their beginning on, so that they
        are not cut into parts.
    """

    content: files.Content
    block_records: np.ndarray
    block_bytes: tuple[int, ...] = ()
    is_whole: bool = False

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return int(self.block_records.sum())

    def end_bytes(self, block: int) -> int:
        """The offset of the end of a block of those that have offsets."""
        following = self.block_bytes[block + 1 : block + 2]
        return following[0] if following else self.content.num_bytes


def blocks(num_records: int, size: int | None = None) -> np.ndarray:
    """The number of records in each block of a file in a format without blocks.

    Args:
      num_records: of the file.
      size: the records of a block, by default `BLOCK_RECORDS`.
    """
    size = size or BLOCK_RECORDS
    return np.minimum(size, num_records - np.arange(0, num_records, size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Files of one format: a frozen value, picklable by cloudpickle.

    Attributes:
      files: the paths or URIs of the files, in order.
      columns: the columns to read; all if it is empty.
      file_type: the format, which each subclass sets.
    """

    file_type: ClassVar[str]
    files: tuple[str, ...]
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        take_names(self, required="files", optional="columns")

    def settings(self) -> dict[str, storage.Json]:
        """The format, and the columns that are read."""
        return {"format": self.file_type, "columns": list(self.columns)}

    @abc.abstractmethod
    def index(self, file: str) -> FileIndex:
        """Reads the index of one file.

        Raises:
          DataError: if it is not a whole file of this format.
        """

    @abc.abstractmethod
    def read(self, unit: units.Unit, skip: int) -> Iterator[Read]:
        """The records of `unit` in order, without the first `skip`.

        Yields a `CorruptError` instead of corrupt records. Which records are corrupt
        must not depend on `skip`.

        Raises:
          DataError: if the file cannot be read, after several tries.
        """


class CorruptError(errors.DataError):
    """Corrupt records: their content differs from what was written.

    Attributes:
      num_records: the number of records.
    """

    def __init__(self, message: str, *, num_records: int) -> None:
        super().__init__(message)
        self.num_records = num_records


# The result of reading a record, or several corrupt ones.
Read: TypeAlias = Element | CorruptError


def corrupt(
    place: str, problem: object, *, num_records: int = 1, remedy: str = ""
) -> CorruptError:
    """The error for `num_records` corrupt records that begin at `place`.

    Args:
      place: the file, and the record in it.
      problem: what is wrong with it.
      num_records: that are lost.
      remedy: if the file may be as it should, with a semicolon.
    """
    return CorruptError(
        f"{place}: corrupt ({problem});{remedy} restore the file from a copy, or set"
        " corrupt_records=skip, which is ReadOptions(skip_corrupt=True), to skip and"
        " count such records",
        num_records=num_records,
    )


def check_columns(
    place: str, names: Collection[str], found: Sequence[str], *, what: str = "column"
) -> None:
    """Checks that a file, or a record, has the columns that are read, and each once.

    Raises:
      DataError: names `place`, the missing columns, and those that it has.
    """
    if len(set(found)) < len(found):
        raise errors.DataError(
            f"{place}: the {what} {most_common(found)!r} is there twice; rename one of"
            " them, and write the file again"
        )
    missing = sorted(set(names) - set(found))
    if missing:
        raise errors.DataError(
            f"{place}: no {what} {missing}, only {found}; set columns, which is"
            " train_data_columns in a configuration"
        )


def most_common(names: Iterable[str]) -> str:
    """The name that is there most often."""
    return Counter(names).most_common(1)[0][0]


def take_names(source: Any, **fields: str) -> None:
    """Converts fields of a source to tuples, also of lists, and paths to absolute ones.

    Args:
      source: the source, during its construction.
      **fields: the name of the `required` and of the `optional` field.

    Raises:
      ConfigError: as in `files.names`, or if a name occurs twice.
    """
    for kind, field in fields.items():
        argument = f"{type(source).__name__}: {field}"
        names = files.names(
            getattr(source, field), argument=argument, required=kind == "required"
        )
        if len(set(names)) < len(names):
            twice = most_common(names)
            raise errors.ConfigError(f"{argument} has {twice!r} twice; name it once")
        if field == "files":
            names = tuple(map(files.absolute_path, names))
        object.__setattr__(source, field, names)


@functools.cache
def indexes(source: Source) -> tuple[FileIndex, ...]:
    """The index of each file, read once in each process.

    Raises:
      DataError: if a file is not of the source's format, or no file holds a record.
    """

    def read(file: str) -> FileIndex:
        return files.retried(lambda: source.index(file), file, at_start=True)

    file_indexes = tuple(in_threads(read, source.files))
    if not any(index.num_records for index in file_indexes):
        raise errors.DataError(
            f"{', '.join(source.files)}: not one record; write them again with"
            " `elastic-ckpt data DIRECTORY FILE`"
        )
    return file_indexes


def current_indexes(source: Source) -> tuple[FileIndex, ...]:
    """The index of each file; if one has changed since, all are indexed again."""
    versions = [index.content.version for index in indexes(source)]
    if any(in_threads(files.has_changed, source.files, versions)):
        files.forget_all()
    return indexes(source)


def in_threads(function: Callable[..., T], *items: Sequence[Any]) -> list[T]:
    """The results of a function for each item, as of `map`, called in threads."""
    workers = min(_INDEX_THREADS, len(items[0]))
    if workers < 2:
        return list(map(function, *items))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, *items))


def read_ahead(source: Source, unit: units.Unit) -> None:
    """Requests the beginning of a unit's block, if it is in an object store."""
    index = indexes(source)[unit.file]
    if index.block_bytes:
        start, end = index.block_bytes[unit.block], index.end_bytes(unit.block)
        files.read_ahead(source.files[unit.file], start, end)


def num_records(source: Source) -> int:
    """The number of records in an epoch."""
    return sum(index.num_records for index in indexes(source))


@functools.cache
def cut(source: Source, num_shards: int) -> units.Units:
    """The units of `source` for `num_shards` shards."""
    file_indexes = indexes(source)
    return units.cut(
        [index.block_records for index in file_indexes],
        num_shards,
        whole=[index.is_whole for index in file_indexes],
    )


def whole_blocks(source: Source) -> units.Units:
    """The blocks of `source`, as units."""
    return units.cut([index.block_records for index in indexes(source)], 0)


def has_whole_blocks(source: Source) -> bool:
    """Whether some blocks can only be read from their beginning on."""
    return any(index.is_whole for index in indexes(source))


def identity(source: Source, *, digested: bool = True) -> dict[str, storage.Json]:
    """The properties that determine the records: settings, and files without paths.

    Args:
      source: the files, as they are now.
      digested: whether to include a digest of their content.
    """
    entries: list[storage.Json] = [
        _entry(file, index, digested)
        for file, index in zip(source.files, current_indexes(source), strict=True)
    ]
    return {**source.settings(), "files": _folded(entries)}


def fingerprint(source: Source) -> str:
    """A digest of the identity, 16 hex digits."""
    return digest.json_digest(identity(source))[:16]


def tree(source: Source, *, max_files: int = 8) -> str:
    """A description of the source, with a line for each of its first files."""
    file_indexes = indexes(source)
    settings = source.settings()
    lines = [
        f"{settings.pop('format')}: {len(file_indexes):,} files,"
        f" {sum(len(i.block_records) for i in file_indexes):,} blocks,"
        f" {num_records(source):,} records, fingerprint {fingerprint(source)}"
    ]
    lines += [f"|-- {key}: {value}" for key, value in settings.items() if value]
    shown = list(zip(source.files, file_indexes, strict=True))[:max_files]
    lines += [
        f"|-- {os.path.basename(file)}: {index.content.num_bytes:,} bytes,"
        f" {len(index.block_records):,} blocks, {index.num_records:,} records"
        for file, index in shown
    ]
    if len(file_indexes) > len(shown):
        lines.append(f"|-- and {len(file_indexes) - len(shown):,} more")
    return "\n".join(lines)


files.register_cache(indexes.cache_clear)
files.register_cache(cut.cache_clear)


def _entry(file: str, index: FileIndex, digested: bool) -> list[storage.Json]:
    content = index.content
    blocks = digest.json_digest(index.block_records.tolist())[:8]
    entry: list[storage.Json] = [
        os.path.basename(file),
        content.num_bytes,
        index.num_records,
        blocks,
    ]
    return [*entry, content.digest] if digested else entry


def _folded(entries: Sequence[Any]) -> list[storage.Json]:
    # Keeps the data state small for any number of files.
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
            *([digest.json_digest([e[4] for e in group])[:16]] if group[0][4:] else []),
        ]
        for group in groups
    ]
