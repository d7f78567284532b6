"""Files of columns: blocks of records, which the shards of a process share.

Records of such files are read as columns, many at a time. A block that several shards
read, a few records each, is decoded once for all of them, and kept as long as there is
room for it: the blocks that were used last, of all files and datasets of the process,
have a budget of memory. Other blocks are decoded a little at a time.
"""

from __future__ import annotations

import abc
import collections
import functools
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data import units
from elastic_ckpt.data.sources import arrow_rows, files, source

if TYPE_CHECKING:
    import pyarrow as pa

# The values of a column, and the start and length of the lists in them.
Lists = tuple[np.ndarray, np.ndarray, np.ndarray]

# The memory of all blocks that are kept in a process.
BUDGET_BYTES = 256 * 2**20
# About how many bytes of a decoded block are read together.
_RUN_BYTES = 256 * 1024


class Decoded:
    """Consecutive records of a block.

    Args:
      batch: the records; None if the block is corrupt.
      place: the block, for errors.
      tokens: the column of tokens if nothing else is needed, which takes less memory.
      problem: why the block is corrupt.

    Attributes:
      num_rows: the number of records.
      names: of the columns.
      batch: the records; None if they are corrupt, or only tokens are needed.
      problem: why they are corrupt; None if they are not.
      num_bytes: the memory that they take, about.
    """

    __slots__ = (
        "__weakref__",
        "_lists",
        "_place",
        "batch",
        "names",
        "num_bytes",
        "num_rows",
        "problem",
    )

    def __init__(
        self,
        batch: pa.RecordBatch | None,
        place: str,
        *,
        tokens: str = "",
        problem: str | None = None,
    ) -> None:
        self.batch, self.problem, self._place = batch, problem, place
        self._lists: dict[str, Lists | None] = {}
        self.num_rows, self.names, self.num_bytes = 0, [], 0
        if batch is None:
            return
        self.num_rows, self.names = batch.num_rows, batch.schema.names
        lists = self.lists(tokens) if tokens else None
        if lists is None:
            self.num_bytes = batch.nbytes
            return
        values, start, length = lists
        if not len(values) or 0 <= int(values.min()) <= int(values.max()) < 2**16:
            values = values.astype(np.uint16)
        self._lists = {tokens: (values, start, length)}
        self.batch = None
        self.num_bytes = values.nbytes + start.nbytes + length.nbytes

    def error(self, num_records: int) -> source.CorruptError:
        """The error for some records of a corrupt block."""
        return source.corrupt(self._place, self.problem, num_records=num_records)

    def lists(self, column: str) -> Lists | None:
        """A column with lists of tokens; None if it has other values."""
        if column not in self._lists:
            self._lists[column] = self._made_lists(column)
        return self._lists[column]

    def _made_lists(self, column: str) -> Lists | None:
        if self.batch is None or column not in self.batch.schema.names:
            return None
        lists = arrow_rows.tokens(self.batch.column(column))
        if lists is None:
            return None
        values, start, length = lists
        try:
            return token_numbers.narrowed(values, place=""), start, length
        except errors.DataError:
            return None


class Picked:
    """Some records of one block, or of several.

    Args:
      parts: blocks, and the numbers of records in each.
    """

    __slots__ = ("_parts", "num_rows")

    def __init__(self, parts: Sequence[tuple[Decoded, np.ndarray]]) -> None:
        self._parts = parts
        self.num_rows = sum(len(rows) for _, rows in parts)

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self._parts[0][0].names

    def documents(self, column: str) -> list[np.ndarray] | None:
        """A column with lists of tokens, copied; None if it has other values."""
        found: list[np.ndarray] = []
        for of, rows in self._parts:
            lists = of.lists(column)
            if lists is None:
                return None
            values, start, length = lists
            some = zip(start[rows].tolist(), length[rows].tolist(), strict=True)
            found += [values[first : first + size].copy() for first, size in some]
        return found

    def elements(self) -> Iterator[source.Element]:
        """The records as dicts of columns."""
        for of, rows in self._parts:
            assert of.batch is not None
            if _follow_each_other(rows):
                some = of.batch.slice(rows[0], len(rows))
            else:
                some = of.batch.take(rows)
            yield from arrow_rows.elements(some)


def _follow_each_other(rows: np.ndarray) -> bool:
    return bool((np.diff(rows) == 1).all())


def picked(
    parts: Iterable[tuple[Decoded, np.ndarray]],
) -> Picked | source.CorruptError:
    """Records of several blocks, up to a corrupt one; or those of a corrupt one.

    Args:
      parts: blocks, and the numbers of records in each.
    """
    sound: list[tuple[Decoded, np.ndarray]] = []
    for block, rows in parts:
        if block.problem is not None:
            if not sound:
                return block.error(len(rows))
            break
        if sound and (block.batch is None) != (sound[0][0].batch is None):
            # Blocks with lists of tokens have no other values, and the others do.
            break
        sound.append((block, rows))
    return Picked(sound)


def in_order(
    block: Decoded, first: int, stop: int
) -> Iterator[Picked | source.CorruptError]:
    """The records of a block from `first` to before `stop`, many at a time."""
    if block.problem is not None:
        yield block.error(stop - first)
        return
    size = max(1, block.num_rows * _RUN_BYTES // max(block.num_bytes, 1))
    for begin in range(first, stop, size):
        yield Picked([(block, np.arange(begin, min(begin + size, stop)))])


class ColumnFiles(source.Source):
    """Files whose records are read as columns, many at a time."""

    @abc.abstractmethod
    def read_batches(
        self, unit: units.Unit, skip: int, *, tokens: str = ""
    ) -> Iterator[Picked | source.CorruptError]:
        """As `read`, but records that follow each other are yielded together.

        Args:
          unit: a block or a part of one.
          skip: the records of the unit to leave out.
          tokens: the column of tokens if nothing else is needed.
        """

    def read(self, unit: units.Unit, skip: int) -> Iterator[source.Read]:
        """Reads the records of a unit, a block or a part of one, from number `skip`."""
        for read in self.read_batches(unit, skip):
            if isinstance(read, source.CorruptError):
                yield read
            else:
                yield from read.elements()


class BlockFiles(ColumnFiles):
    """Files whose blocks are decoded as a whole or a little at a time."""

    # What a block is in this format.
    _block_name: ClassVar[str]

    @abc.abstractmethod
    def _batch(self, unit: units.Unit) -> pa.RecordBatch:
        """The block of a unit, checked by `arrow_rows.sound`.

        Raises:
          DamagedError: if not all of it can be decoded.
          OSError: if it cannot be read.
        """

    @abc.abstractmethod
    def _stream(self, unit: units.Unit, row: int) -> Iterator[pa.RecordBatch]:
        """The block of a unit from a row on, a little at a time, checked likewise.

        What is checked together must not depend on the row.

        Raises:
          DamagedError: where it cannot be decoded.
          DataError: if it cannot be read, after several tries.
        """

    def _is_shared(self, unit: units.Unit) -> bool:
        """Whether the block of a unit is decoded for several shards, and kept."""
        del unit
        return False

    def place(self, unit: units.Unit) -> str:
        """The block of a unit, for errors."""
        return f"{self.files[unit.file]}, {self._block_name} {unit.block}"

    def decoded(self, unit: units.Unit, *, tokens: str = "") -> Decoded:
        """The block of a unit; of the column of tokens only, if one is named."""
        place = self.place(unit)
        try:
            batch = files.retried(functools.partial(self._batch, unit), place)
            return Decoded(batch, place, tokens=tokens)
        except arrow_rows.DamagedError as error:
            return Decoded(None, place, problem=str(error))

    def read_batches(
        self, unit: units.Unit, skip: int, *, tokens: str = ""
    ) -> Iterator[Picked | source.CorruptError]:
        """See `ColumnFiles`."""
        row, stop = unit.first + skip, unit.first + unit.num_records
        if row == stop:
            return
        if self._is_shared(unit):
            yield from in_order(kept(self, unit, tokens), row, stop)
            return
        # A local name: at the end of the program the module's may be deleted first.
        damaged_error = arrow_rows.DamagedError
        try:
            for batch in self._stream(unit, row):
                block = Decoded(batch.slice(0, stop - row), self.place(unit))
                yield from in_order(block, 0, block.num_rows)
                row += block.num_rows
                if row == stop:
                    return
        except damaged_error as error:
            lost = Decoded(None, self.place(unit), problem=str(error))
            yield from in_order(lost, row, stop)


class _Kept:
    """The decoded blocks that were used last, and those that are in use."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keeps none; also after a fork, when another thread may hold the lock."""
        self._lock = threading.Lock()
        self._blocks: collections.OrderedDict[Hashable, Decoded]
        self._blocks = collections.OrderedDict()
        self._in_use: weakref.WeakValueDictionary[Hashable, Decoded]
        self._in_use = weakref.WeakValueDictionary()
        # Held while a block is decoded, so that others wait for it.
        self._decoding: dict[Hashable, threading.Lock] = {}
        self._num_bytes = 0

    def get(self, of: BlockFiles, unit: units.Unit, tokens: str) -> Decoded:
        key = (of.files[unit.file], unit.block, of.columns, tokens)
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found
            decoding = self._decoding.setdefault(key, threading.Lock())
        with decoding:
            made = self._in_use.get(key) or of.decoded(unit, tokens=tokens)
            with self._lock:
                self._decoding.pop(key, None)
                self._in_use[key] = made
                if key not in self._blocks:
                    self._blocks[key] = made
                    self._num_bytes += made.num_bytes
                while self._num_bytes > BUDGET_BYTES and len(self._blocks) > 1:
                    _, oldest = self._blocks.popitem(last=False)
                    self._num_bytes -= oldest.num_bytes
        return made

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._in_use.clear()
            self._num_bytes = 0


_KEPT = _Kept()
files.register_cache(_KEPT.clear)
os.register_at_fork(after_in_child=_KEPT.begin)


def kept(of: BlockFiles, unit: units.Unit, tokens: str) -> Decoded:
    """The block of a unit, decoded now if it is not kept.

    Args:
      of: the source.
      unit: in the block.
      tokens: the column of tokens if nothing else is needed.
    """
    return _KEPT.get(of, unit, tokens)
