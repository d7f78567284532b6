"""Sources: files of records, in blocks that are decoded as a whole.

A source is a list of files. A file's index has the number of records in each block. A
block is at most about 512 KiB: a Parquet row group or a part of one, or a few records
in other formats. Indexes that require a pass over the file are cached under
`$XDG_CACHE_HOME/elastic_ckpt`, one for each version of the file. `data.order` deals
records to shards.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, digest, errors, storage
from elastic_ckpt.data.sources import files

T = TypeVar("T")

# A record: a dict from column name to value.
Element = dict[str, Any]

# A block ends at the first of these limits, unless the format has its own blocks.
BLOCK_RECORDS = 256
BLOCK_BYTES = 2**19
# Row groups and record batches that are at most this many blocks in size are not split.
_LARGER = 4
# The number of blocks in a chain, in files without their own blocks.
_CHAIN_BLOCKS = 8
# Maximum number of files that an identity lists by name; more are merged into one.
_MAX_NAMED = 1024
# Maximum number of files in a description.
_MAX_SHOWN = 8
_INDEX_THREADS = 16
_INDEX_VERSION = 1


class Found(NamedTuple):
    """The blocks of a file.

    Attributes:
      content: a digest of the file, or of the parts that reveal any change to it.
      records: the number of records in each block.
      starts: the offset of each block; None if blocks cannot be read by offset.
      chains: the index of each block's chain; None if each block is its own chain. The
        blocks of a chain stay in sequence even when shuffled, because some can only be
        read after their predecessors.
    """

    content: str
    records: list[int]
    starts: list[int] | None = None
    chains: list[int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileIndex:
    """The index of one file.

    Attributes:
      content: the file size, and a digest of the parts that the format digests.
      block_records: the number of records in each block, int64 `[blocks]`.
      block_starts: the offset of each block, int64 `[blocks]`; the file size if blocks
        cannot be read by offset.
      chains: as in `Found`, int64 `[blocks]`.
    """

    content: files.Content
    block_records: np.ndarray
    block_starts: np.ndarray
    chains: np.ndarray

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        return int(self.block_records.sum())

    def first_record(self, block: int) -> int:
        """The index of a block's first record in the file."""
        return int(self.block_records[:block].sum())

    def span(self, block: int) -> tuple[int, int]:
        """The start and end offsets of a block."""
        begin, *end = self.block_starts[block : block + 2].tolist()
        return begin, *(end or [self.content.num_bytes])

    def chain(self, block: int) -> range:
        """The blocks of the chain that contains a block."""
        number = int(self.chains[block])
        return range(*np.searchsorted(self.chains, [number, number + 1]).tolist())


def pieces(num_records: int, num_bytes: int, most: int | None = None) -> list[int]:
    """Splits records into blocks; returns the number of records in each block."""
    number = -(-num_bytes // BLOCK_BYTES) if num_bytes > _LARGER * BLOCK_BYTES else 1
    size = max(1, min(-(-num_records // number), most or num_records))
    begins = range(0, max(1, num_records), size)
    return [min(size, num_records - begin) for begin in begins]


class Block(abc.ABC):
    """The records of a block.

    Attributes:
      num_bytes: the records' approximate size in memory.
    """

    num_bytes = 0

    @abc.abstractmethod
    def elements(self, rows: Sequence[int]) -> list[Element]:
        """Returns at least one of the records `rows`, and stops at the first error.

        Raises:
          CorruptError: if the first record is corrupt.
          DataError: if the first record lacks something that the source or the reader
            requests.
        """

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray] | None:
        """The tokens in a column; None if they must be taken from `elements`."""
        del column, rows
        return None


def until_error(function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    """Returns at least one of a function's results, and stops at the first error."""
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
    """A block whose records cannot be read."""

    def __init__(self, error: CorruptError) -> None:
        self._error = error

    def elements(self, rows: Sequence[int]) -> list[Element]:
        """See `Block`."""
        del rows
        raise CorruptError(str(self._error))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Files of the same format, as a frozen value that cloudpickle can pickle.

    Attributes:
      files: the paths or URIs of the files, in order.
      columns: the columns to read; empty reads all.
      file_type: the format; each subclass sets it.
    """

    file_type: ClassVar[str]
    # Whether to cache indexes on disk, because they require a pass over the file.
    _is_kept: ClassVar[bool] = True
    files: tuple[str, ...]
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("files", "columns"):
            names = files.names(
                getattr(self, field),
                argument=f"{type(self).__name__}: {field}",
                required=field == "files",
            )
            if field == "files":
                names = tuple(map(files.absolute_path, names))
            object.__setattr__(self, field, names)

    def settings(self) -> dict[str, storage.Json]:
        """The format and the columns to read."""
        return {"format": self.file_type, "columns": list(self.columns)}

    def _paths(self, file: str) -> tuple[str, ...]:
        """A file and all files that belong to it."""
        return (file,)

    def index(self, file: str) -> FileIndex:
        """The index of one file.

        Raises:
          DataError: if the file is incomplete or has a different format.
        """
        content = files.content(*self._paths(file))
        limits = [BLOCK_RECORDS, BLOCK_BYTES]
        place = files.absolute_path(file)
        key = [place, self.settings(), *limits, *dataclasses.astuple(content)]
        is_kept = self._is_kept and content.version
        find = functools.partial(self._find, file)
        found = _kept(self.file_type, key, find) if is_kept else find()._asdict()
        number = len(found["records"])
        both = digest.json_digest([content.digest, found["content"]])[:16]
        return FileIndex(
            content=dataclasses.replace(content, digest=both),
            block_records=np.array(found["records"], np.int64),
            block_starts=np.array(found["starts"] or [content.num_bytes] * number, int),
            chains=np.array(found["chains"] or range(number), int),
        )

    @abc.abstractmethod
    def _find(self, file: str) -> Found:
        """Finds the blocks of a file.

        Raises:
          OSError: if the file cannot be read.
          DataError: if the file is incomplete or has a different format.
        """

    @abc.abstractmethod
    def decode(self, file: int, block: int) -> Block:
        """Reads a block, given the file's index and the block's index in the file.

        Raises:
          OSError: if the file cannot be read at this time; the caller tries again.
          DataError: if the file differs from its index.
        """

    @functools.cached_property
    def key(self) -> str:
        """A string that is the same for sources that decode a file identically."""
        return digest.json_digest(self.settings())


def _kept(kind: str, key: storage.Json, find: Callable[[], Found]) -> dict[str, Any]:
    # The result of `find`, cached on disk with everything it depends on as the key.
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = epath.Path(root, "elastic_ckpt", kind, f"{digest.json_digest(key)}.json")
    with contextlib.suppress(errors.DataError, OSError):
        return checked_json.read(path, what="index", version=_INDEX_VERSION)
    new = find()._asdict()
    with contextlib.suppress(OSError):
        storage.write_atomic(path, checked_json.to_bytes(new, version=_INDEX_VERSION))
    return new


class LostError(Exception):
    """The next record and all later ones cannot be found."""


class RawBlock(Block):
    """Records that are decoded one by one when they are read.

    Args:
      records: an iterable over the records, in order, that raises a `LostError` where
        the file is damaged.
      element: a function that decodes a record; its second argument is the record's
        place, used in error messages.
      name: the place of the records, without a record number.
      first: the index of the first record.

    Attributes:
      records: the records before any damage.
      lost: the damage, if any.
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
                self.num_bytes += sum(map(len, _parts(record)))
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


def _parts(record: Any) -> list[bytes]:
    # The bytes of a record, or of its fields with their names.
    if isinstance(record, dict):
        named = ((os.fsencode(f"{n} {len(part)} "), part) for n, part in record.items())
        return [*itertools.chain.from_iterable(named)]
    return [record] if isinstance(record, bytes) else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawFiles(Source):
    """Files whose records are located by block and decoded one by one."""

    @abc.abstractmethod
    def _element(self, record: Any, place: str) -> Element:
        """Decodes a record; raises the errors of `Block.elements`."""

    def _block(self, file: int, block: int, records: Iterable[Any]) -> RawBlock:
        # Checks that the block has as many records as the index says.
        index, path = indexes(self)[file], self.files[file]
        made = RawBlock(
            records,
            self._element,
            name=f"{path}, record",
            first=index.first_record(block),
        )
        if made.lost is None and len(made.records) != index.block_records[block]:
            raise changed(path, f"block {block} has {len(made.records)} records")
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkedFiles(RawFiles):
    """Files without an index of their records.

    A pass over a file finds and digests the records. A few blocks form a chain, so that
    a file in an object store is read in larger pieces.
    """

    @abc.abstractmethod
    def _records(
        self, file: str, stream: BinaryIO, *, is_whole: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yields the records of an open file or a block's bytes, with their offsets.

        A whole file is also checked for completeness.

        Raises:
          LostError: if the file is damaged; raised when the iteration gets there.
          DataError: if part of a whole file would be skipped.
        """

    def _find(self, file: str) -> Found:
        starts: list[int] = []
        counts: list[int] = []
        content = digest.values_hash()
        try:
            with files.opened(file) as stream:
                for start, record in self._records(file, stream, is_whole=True):
                    if (
                        not starts
                        or counts[-1] == BLOCK_RECORDS
                        or start >= starts[-1] + BLOCK_BYTES
                    ):
                        starts.append(start)
                        counts.append(0)
                    counts[-1] += 1
                    for part in _parts(record):
                        content.update(part)
        except LostError as error:
            raise foreign(file, self.file_type, error) from None
        chains = [number // _CHAIN_BLOCKS for number in range(len(starts))]
        return Found(content.hexdigest(), counts, starts, chains)

    def decode(self, file: int, block: int) -> Block:
        """See `Source`."""
        index, path = indexes(self)[file], self.files[file]
        begin, end = index.span(block)
        _, until = index.span(index.chain(block)[-1])
        with files.opened(path, until) as stream:
            stream.seek(begin)
            content = io.BytesIO(stream.read(end - begin))
        records = self._records(path, content, is_whole=False)
        return self._block(file, block, (record for _, record in records))


class CorruptError(errors.DataError):
    """A record differs from what was written."""


def corrupt(place: str, problem: object, *, remedy: str = "") -> CorruptError:
    """The error for a corrupt record; `remedy` helps if the file is intact."""
    return CorruptError(
        f"{place}: the data is corrupt ({problem});{remedy} restore the file from a"
        " good copy or, to skip and count such records, set corrupt_records=skip (in"
        " Python, ReadOptions(skip_corrupt=True))"
    )


def foreign(file: str, kind: str, problem: object) -> errors.DataError:
    """The error for a file that has the wrong format or is incomplete."""
    return errors.DataError(
        f"{file} is not a complete {kind} file ({problem}); restore it from a good"
        " copy, set grain_file_type to its actual format or, if it was joined with"
        " cat, list the original files"
    )


def changed(file: str, problem: str) -> errors.DataError:
    """The error for a file that differs from its index."""
    return errors.DataError(
        f"{file}: {problem}, so the file changed during the run; restore the original"
        " file, and restart the run"
    )


def check_columns(
    place: str, names: Collection[str], found: Sequence[str], *, what: str = "column"
) -> None:
    """Checks that a file or record has the requested columns, each only once.

    Raises:
      DataError: if a column is missing or occurs twice. The message includes `place`
        and the missing and existing columns.
    """
    if len(set(found)) < len(found):
        twice = max(found, key=found.count)
        raise errors.DataError(
            f"{place}: the {what} {twice!r} occurs twice; rename one of the two, and"
            " rewrite the file"
        )
    missing = sorted(set(names) - set(found))
    if missing:
        raise errors.DataError(
            f"{place}: there is no {what} {missing}, only {found}; set columns to"
            " existing names (train_data_columns in a configuration)"
        )


@functools.cache
def indexes(source: Source) -> tuple[FileIndex, ...]:
    """The index of each file, read once in each process.

    Raises:
      DataError: if a file does not have the source's format, or if no file has records.
    """

    def read(file: str) -> FileIndex:
        return files.retried(lambda: source.index(file), file, at_start=True)

    file_indexes = tuple(in_threads(read, source.files))
    if not any(index.num_records for index in file_indexes):
        raise errors.DataError(
            f"{', '.join(source.files)}: these files have no records; rewrite them with"
            " `elastic-ckpt data DIRECTORY FILE`"
        )
    return file_indexes


def current_indexes(source: Source) -> tuple[FileIndex, ...]:
    """The index of each file; if a file has changed, all files are reindexed."""
    versions = [index.content.version for index in indexes(source)]
    now = in_threads(lambda file: files.version(*source._paths(file)), source.files)
    if now != versions:
        files.forget_all()
    return indexes(source)


def in_threads(function: Callable[..., T], *items: Sequence[Any]) -> list[T]:
    """Like `map`, but calls the function in threads and returns a list."""
    workers = min(_INDEX_THREADS, len(items[0]))
    if workers < 2:
        return list(map(function, *items))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, *items))


def num_records(source: Source) -> int:
    """The number of records in an epoch."""
    return sum(index.num_records for index in indexes(source))


def identity(source: Source, *, digested: bool = True) -> dict[str, storage.Json]:
    """The settings and current files, without paths, that determine the records."""
    entries: list[list[Any]] = [
        [
            os.path.basename(file),
            index.content.num_bytes,
            index.num_records,
            digest.json_digest(index.block_records.tolist())[:8],
            index.content.digest,
        ][: 5 if digested else 4]
        for file, index in zip(source.files, current_indexes(source), strict=True)
    ]
    if len(entries) > _MAX_NAMED:
        # Keeps the data state small for any number of files.
        _, sizes, counts, *others = zip(*entries, strict=True)
        name = f"{entries[0][0]} and {len(entries) - 1:,} more"
        digests = [digest.json_digest(list(each))[:16] for each in others]
        entries = [[name, sum(sizes), sum(counts), *digests]]
    return {**source.settings(), "files": entries}


def fingerprint(source: Source) -> str:
    """A digest of the identity, 16 hex digits."""
    return digest.json_digest(identity(source))[:16]


def tree(source: Source) -> str:
    """Describes the source, with a line for each of its first files."""
    file_indexes, settings = indexes(source), source.settings()
    lines = [
        f"{settings.pop('format')}: {len(file_indexes):,} files,"
        f" {sum(len(i.block_records) for i in file_indexes):,} blocks,"
        f" {num_records(source):,} records, fingerprint {fingerprint(source)}",
        *(f"|-- {key}: {value}" for key, value in settings.items() if value),
        *(
            f"|-- {os.path.basename(file)}: {index.content.num_bytes:,} bytes,"
            f" {len(index.block_records):,} blocks, {index.num_records:,} records"
            for file, index in zip(
                source.files, file_indexes[:_MAX_SHOWN], strict=False
            )
        ),
    ]
    if len(file_indexes) > _MAX_SHOWN:
        lines.append(f"|-- and {len(file_indexes) - _MAX_SHOWN:,} more")
    return "\n".join(lines)


files.register_cache(indexes.cache_clear)
