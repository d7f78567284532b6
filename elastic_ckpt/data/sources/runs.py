"""Files that are read in order: some records at a time, from where the last ones ended.

A file is open only while such a run of records is read, unless it can only be read from
its beginning on, as a compressed one.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Generator, Iterator
from typing import Any, ClassVar

from elastic_ckpt.core import errors
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import files, source


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


class _Run:
    """Reads a file from an offset on, without the first records."""

    def __init__(
        self, of: RunFiles, file: str, offset: int, before: int, stays_open: bool
    ) -> None:
        self._of, self._file, self._stays_open = of, file, stays_open
        self.offset, self._before = offset, before
        self._records: Generator[tuple[Any, int, int]] | None = None

    def next(self, most: int) -> list[Any]:
        """The next records, at least one if there are any; may be tried again."""
        run: list[Any] = []
        left_bytes, end = self._of._run_bytes, self.offset
        try:
            if self._records is None:
                self._records = self._of._records(self._file, self.offset, self._before)
            for record, size, after in self._records:
                run.append(record)
                left_bytes, end = left_bytes - size, after
                if left_bytes <= 0 or len(run) == most:
                    break
        except BaseException as error:
            self.close()
            # Those before the damage are returned first, wherever reading began.
            if not run or not isinstance(error, LostError):
                raise
        if self._stays_open:
            self._before += len(run)
        elif run:
            self.close()
            self.offset, self._before = end, 0
        return run

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None
