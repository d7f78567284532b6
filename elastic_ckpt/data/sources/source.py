"""Sources: files of records, in blocks that are decoded as a whole.

A source is a list of files. The index of a file has the number of records in each of
its blocks, of about 512 KiB at most: a Parquet row group or a part of one, or some
records of another format. Which shard reads which of them, `data.order` says.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from elastic_ckpt.core import digest, errors, storage
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.sources import files

T = TypeVar("T")

# A record: its columns by name.
Element = dict[str, Any]

# A block ends at the first of these limits, unless its format has blocks of its own.
BLOCK_RECORDS = 256
BLOCK_BYTES = 2**19
# How many times larger a row group or a record batch is that is not cut.
_LARGER = 4
# The most files that a fingerprint lists by name; more are combined into groups.
_MAX_NAMED = 1024
_INDEX_THREADS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileIndex:
    """The index of one file.

    Attributes:
      content: its size, and a digest of as much of it as the format digests.
      block_records: records of each block, int64 `[blocks]`.
      block_bytes: the offset of each block, int64 `[blocks]`; None if it is not known.
      is_chained: of each block, whether it follows the one before it in any order of
        the data, as some can only be read after that; None if none does.
    """

    content: files.Content
    block_records: np.ndarray
    block_bytes: np.ndarray | None = None
    is_chained: np.ndarray | None = None

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return int(self.block_records.sum())

    def first_record(self, block: int) -> int:
        """The number of the first record of a block."""
        return int(self.block_records[:block].sum())

    def span(self, block: int) -> tuple[int, int]:
        """The offsets of the beginning and the end of a block that has them."""
        assert self.block_bytes is not None
        ends = self.block_bytes[block + 1 : block + 2].tolist()
        return int(self.block_bytes[block]), *(ends or [self.content.num_bytes])

    def chain(self, block: int) -> range:
        """The blocks that follow each other in any order, with a block among them."""
        if self.is_chained is None:
            return range(block, block + 1)
        begins = np.flatnonzero(~self.is_chained)
        number = int(np.searchsorted(begins, block, side="right"))
        ends = [*begins.tolist(), len(self.block_records)]
        return range(ends[number - 1], ends[number])


def pieces(num_records: int, num_bytes: int, most: int | None = None) -> np.ndarray:
    """The records of each block of a file, or a part of one, that has so many bytes.

    Args:
      num_records: in all.
      num_bytes: of all.
      most: the most records of a block.
    """
    number = -(-num_bytes // BLOCK_BYTES) if num_bytes > _LARGER * BLOCK_BYTES else 1
    size = max(1, min(-(-num_records // number), most or num_records))
    return np.minimum(size, num_records - np.arange(0, max(1, num_records), size))


class Block(abc.ABC):
    """The records of a block.

    Attributes:
      num_bytes: the memory that they take, about.
    """

    num_bytes = 0

    @abc.abstractmethod
    def elements(self, rows: Sequence[int]) -> list[Element]:
        """Some records, at least one: those before the first that has an error.

        Raises:
          CorruptError: if the first record is corrupt.
          DataError: if it is not what its source or its reader asks for.
        """

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray]:
        """The tokens in a column of some records, in the manner of `elements`."""

        def of_element(element: Element) -> np.ndarray:
            return token_numbers.of_element(element, column)

        return until_error(of_element, self.elements(rows))


def until_error(function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    """The results of a function, at least one: those before its first error."""
    results: list[T] = []
    for item in items:
        try:
            results.append(function(item))
        except errors.DataError:
            if not results:
                raise
            break
    return results


class LostBlock(Block):
    """Records of which none can be read.

    Args:
      place: the file, and the block in it.
      problem: what is wrong with it.
    """

    def __init__(self, place: str, problem: object) -> None:
        self._place, self._problem = place, problem

    def elements(self, rows: Sequence[int]) -> list[Element]:
        """See `Block`."""
        del rows
        raise corrupt(self._place, self._problem)


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
    def decode(self, file: int, block: int) -> Block:
        """Reads a block of a file, both by their numbers.

        Raises:
          OSError: if the file cannot be read now; it is tried again.
          DataError: if it is not the file of the index.
        """

    @functools.cached_property
    def key(self) -> str:
        """Equal for sources that decode a block of the same file to the same."""
        return digest.json_digest(self.settings())


class LostError(Exception):
    """The next record of a block, and those after it, cannot be found."""


class RawBlock(Block):
    """Records that are decoded one by one, when they are read.

    Args:
      records: the records in order; raises a `LostError` before damage.
      element: returns the element of one, given the place of it for errors.
      name: that of the place, without the number of the record.
      first: the number of the first record.

    Attributes:
      records: those before damage.
      lost: the damage.
    """

    def __init__(
        self,
        records: Iterable[Any],
        element: Callable[[Any, str], Element],
        *,
        name: str,
        first: int,
    ) -> None:
        self._element, self._name, self._first = element, name, first
        self.records: list[Any] = []
        self.lost: LostError | None = None
        try:
            for record in records:
                self.records.append(record)
                self.num_bytes += _num_bytes(record)
        except LostError as error:
            self.lost = error

    def elements(self, rows: Sequence[int]) -> list[Element]:
        """See `Block`."""
        return until_error(self._one, rows)

    def _one(self, row: int) -> Element:
        place = f"{self._name} {self._first + row}"
        if row >= len(self.records):
            raise corrupt(place, self.lost)
        return self._element(self.records[row], place)


def _num_bytes(record: Any) -> int:
    parts = record.values() if isinstance(record, dict) else [record]
    return sum(len(each) for each in parts if isinstance(each, bytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawFiles(Source):
    """Files of records that are found together, and decoded one by one."""

    # What a record is in this format.
    _record_name: ClassVar[str] = "record"

    @abc.abstractmethod
    def _element(self, record: Any, place: str) -> Element:
        """The element of a record; raises the errors of `Block.elements`."""

    def _block(self, file: int, block: int, records: Iterable[Any]) -> RawBlock:
        # The block that has these records.
        index, path = indexes(self)[file], self.files[file]
        made = RawBlock(
            records,
            self._element,
            name=f"{path}, {self._record_name}",
            first=index.first_record(block),
        )
        if made.lost is None and len(made.records) != index.block_records[block]:
            raise changed(path, f"block {block} has {len(made.records)} records")
        return made

    def _content(self, file: int, block: int) -> bytes:
        # The bytes of a block.
        index = indexes(self)[file]
        begin, end = index.span(block)
        _, until = index.span(index.chain(block)[-1])
        with files.opened(self.files[file], until) as stream:
            stream.seek(begin)
            return stream.read(end - begin)


class CorruptError(errors.DataError):
    """A corrupt record: its content differs from what was written."""


def corrupt(place: str, problem: object, *, remedy: str = "") -> CorruptError:
    """The error for a corrupt record.

    Args:
      place: the file, and the record or the block in it.
      problem: what is wrong with it.
      remedy: if the file may be as it should, with a semicolon.
    """
    return CorruptError(
        f"{place}: corrupt ({problem});{remedy} restore the file from a copy, or set"
        " corrupt_records=skip, which is ReadOptions(skip_corrupt=True), to skip and"
        " count such records"
    )


def changed(file: str, problem: str) -> errors.DataError:
    """The error for a file that differs from its index."""
    return errors.DataError(
        f"{file}: {problem}: the file has changed during the run; restore it from a"
        " copy, and start the run again"
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


def num_records(source: Source) -> int:
    """The number of records in an epoch."""
    return sum(index.num_records for index in indexes(source))


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
