"""Files that are read in order: some records at a time, from where the last ones ended.

A file is open only while such a run of records is read, unless it can only be read from
its beginning on, as a compressed one. Such files stay open between two runs as long as
the process has descriptors for them: those that were used last, of all shards and
datasets. Another one is opened again, and read up to the record again.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import os
import resource
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, TypeAlias

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files, source

# The most files that stay open; each takes about half a MiB.
_MAX_OPEN = 1024

# Each record, its size in bytes, and the offset after it.
_Records: TypeAlias = Generator[tuple[Any, int, int]]


class LostError(Exception):
    """The rest of a block cannot be found.

    Attributes:
      place: of the damage in the file; empty if it is in the record that is next.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem)
        self.place = place


class RunFiles(source.Source):
    """Files that are read in order."""

    # What a record is in this format.
    _record_name: ClassVar[str] = "record"
    # About how many bytes are read together.
    _run_bytes: ClassVar[int] = 256 * 1024

    @abc.abstractmethod
    def _records(
        self, file: str, offset: int, before: int
    ) -> Generator[tuple[Any, int, int]]:
        """The records from an offset on without the first `before`.

        Yields:
          A record, its size in bytes, and the offset after it.

        Raises:
          LostError: before a record that cannot be found.
        """

    @abc.abstractmethod
    def _element(self, record: Any, place: str) -> source.Read:
        """The element of a record."""

    def _place(self, number: int, offset: int) -> str:
        """The record that is read next, or its offset, for errors."""
        del offset
        return f"{self._record_name} {number}"

    def _check_end(
        self, file: str, index: source.FileIndex, block: int, end: int
    ) -> None:
        """Checks where a block ended, once its last record was read."""

    def read(self, unit: units.Unit, skip: int) -> Iterator[source.Read]:
        """Reads the records of a unit, a block or a part of one, from number `skip`."""
        file = self.files[unit.file]
        index = source.indexes(self)[unit.file]
        before, left = unit.first + skip, unit.num_records - skip
        number = int(index.block_records[: unit.block].sum()) + before
        run = _Run(self, file, index.block_bytes[unit.block], before, index.is_whole)
        with contextlib.closing(run):
            while left:
                place = f"{file}, {self._place(number, run.offset)}"
                try:
                    records = files.retried(functools.partial(run.next, left), place)
                except LostError as error:
                    place = f"{file}, {error.place}" if error.place else place
                    yield source.corrupt(place, error, num_records=left)
                    return
                if not records:
                    raise errors.DataError(
                        f"{place}: the file ends here, but has {left} more records in"
                        " its index: it has changed during the run; restore it from a"
                        " copy, and start the run again"
                    )
                for record in records:
                    yield self._element(record, f"{file}, {self._record_name} {number}")
                    number += 1
                left -= len(records)
        ends_block = unit.first + unit.num_records == unit.block_records
        if ends_block and skip < unit.num_records:
            self._check_end(file, index, unit.block, run.offset)


class _OpenFiles:
    """The open files of runs that are not read at this moment, oldest first.

    A run takes its file out to read, so that no other thread closes it meanwhile. There
    is no lock, as one could be held during a fork, or where the collector closes a run:
    each operation on the dict is atomic.

    Args:
      most: returns how many may be open.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self.begin()

    def begin(self) -> None:
        """Keeps none; also after a fork, as the parent reads on in the same files."""
        self._idle: collections.OrderedDict[_Run, _Records] = collections.OrderedDict()

    def take(self, run: _Run) -> _Records | None:
        """The records of a run from where it ended; None if its file is closed."""
        return self._idle.pop(run, None)

    def keep(self, run: _Run, records: _Records) -> None:
        """Keeps the file of a run open, and closes the oldest ones if needed."""
        self._idle[run] = records
        while len(self._idle) > self._most():
            with contextlib.suppress(KeyError, OSError):
                self._idle.popitem(last=False)[1].close()


def _most_local() -> int:
    # Other parts of the program need descriptors, too.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else min(soft // 2, _MAX_OPEN)


# Files in object stores have no descriptors.
_LOCAL, _REMOTE = _OpenFiles(_most_local), _OpenFiles(lambda: _MAX_OPEN)
os.register_at_fork(after_in_child=_LOCAL.begin)
os.register_at_fork(after_in_child=_REMOTE.begin)


class _Run:
    """Reads a file from an offset on, without the first records."""

    def __init__(
        self, of: RunFiles, file: str, offset: int, before: int, stays_open: bool
    ) -> None:
        self._of, self._file, self._stays_open = of, file, stays_open
        self._open_files = _LOCAL if storage.is_local(file) else _REMOTE
        self.offset, self._before = offset, before

    def next(self, most: int) -> list[Any]:
        """The next records, at least one if there are any; may be tried again."""
        run: list[Any] = []
        has_failed = False
        left_bytes, end = self._of._run_bytes, self.offset
        records = self._open_files.take(self)
        if records is None:
            records = self._of._records(self._file, self.offset, self._before)
        try:
            for record, size, after in records:
                run.append(record)
                left_bytes, end = left_bytes - size, after
                if left_bytes <= 0 or len(run) == most:
                    break
        except BaseException as error:
            has_failed = True
            records.close()
            # Those before the damage are returned first, wherever reading began.
            if not run or not isinstance(error, LostError):
                raise
        if self._stays_open:
            self._before += len(run)
            if not has_failed:
                self._open_files.keep(self, records)
        elif run:
            records.close()
            self.offset, self._before = end, 0
        return run

    def close(self) -> None:
        records = self._open_files.take(self)
        if records is not None:
            records.close()
