"""Decoded blocks of files, which the shards of a process share.

Small blocks are read by many shards together (`data.units`), a few records each. A
block is decoded once for all of them, and kept as long as there is room for it: the
blocks that were used last, of all files and datasets of the process, have a budget of
memory.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import blocks, units
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.sources import arrow_rows, files, source

if TYPE_CHECKING:
    import pyarrow as pa

# The memory of all blocks that are kept in a process.
BUDGET_BYTES = 256 * 2**20


class Decoded:
    """The records of a block.

    Args:
      batch: the records; None if the whole block is corrupt.
      tokens: the column of tokens if nothing else is needed, which takes less memory.
      lost: which records are corrupt, bool `[records]`, because they are not decoded.
      problem: why they are not.
      is_checked: whether no record is corrupt.

    Attributes:
      num_rows: the number of records.
      names: of the columns.
      batch: the records; None if they are corrupt, or only tokens are needed.
      corrupt: which are corrupt, bool `[records]`; None if none is.
      num_bytes: the memory that they take, about.
    """

    __slots__ = (
        "_lists",
        "_problem",
        "batch",
        "corrupt",
        "names",
        "num_bytes",
        "num_rows",
    )

    def __init__(
        self,
        batch: pa.RecordBatch | None,
        *,
        tokens: str = "",
        lost: np.ndarray | None = None,
        problem: object = "",
        is_checked: bool = False,
    ) -> None:
        self.batch, self.corrupt, self._problem = batch, lost, problem
        self._lists: dict[str, blocks.Lists | None] = {}
        self.num_rows, self.names, self.num_bytes = 0, [], 0
        if batch is None:
            return
        self.num_rows, self.names = batch.num_rows, batch.schema.names
        if not is_checked and arrow_rows.problem(batch):
            corrupt = np.zeros(batch.num_rows, bool) if lost is None else lost.copy()
            for row in np.flatnonzero(~corrupt).tolist():
                corrupt[row] = bool(arrow_rows.problem(batch.slice(row, 1)))
            self.corrupt = corrupt if corrupt.any() else None
        lists = self.lists(tokens) if tokens and self.corrupt is None else None
        if lists is None:
            self.num_bytes = batch.nbytes
            return
        values, start, length = lists
        if not len(values) or 0 <= int(values.min()) <= int(values.max()) < 2**16:
            values = values.astype(np.uint16)
        self._lists = {tokens: (values, start, length)}
        self.batch = None
        self.num_bytes = values.nbytes + start.nbytes + length.nbytes

    def why(self, row: int) -> object:
        """Why a record is corrupt."""
        if self.batch is None:
            return self._problem
        return arrow_rows.problem(self.batch.slice(row, 1)) or self._problem

    def lists(self, column: str) -> blocks.Lists | None:
        """A column with lists of tokens; None if it has other values."""
        if column not in self._lists:
            self._lists[column] = self._made_lists(column)
        return self._lists[column]

    def _made_lists(self, column: str) -> blocks.Lists | None:
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
      parts: blocks, and the numbers of records in each; None for all of them.
    """

    __slots__ = ("_parts", "num_rows")

    def __init__(self, parts: Sequence[tuple[Decoded, np.ndarray | None]]) -> None:
        self._parts = parts
        self.num_rows = sum(
            of.num_rows if rows is None else len(rows) for of, rows in parts
        )

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self._parts[0][0].names

    def lists(self, column: str) -> blocks.Lists | None:
        """A column with lists of tokens; None if it has other values."""
        parts = []
        for of, rows in self._parts:
            lists = of.lists(column)
            if lists is None:
                return None
            values, start, length = lists
            if rows is not None:
                start, length = start[rows], length[rows]
            parts.append((values, start, length))
        return blocks.together(parts)

    def elements(self) -> Iterator[source.Element]:
        """The records as dicts of columns."""
        for of, rows in self._parts:
            batch = of.batch
            assert batch is not None
            yield from arrow_rows.elements(batch if rows is None else batch.take(rows))


def all_of(batch: pa.RecordBatch) -> Picked:
    """The records of a batch that is not kept; none is corrupt."""
    return Picked([(Decoded(batch, is_checked=True), None)])


def read(
    of: Any, picked: Sequence[tuple[units.Unit, np.ndarray]], *, tokens: str = ""
) -> Picked | source.CorruptError:
    """Records of several blocks, up to the first corrupt one; or corrupt ones.

    Args:
      of: the source, with the methods `decoded` and `place`.
      picked: blocks, and the numbers of records in each.
      tokens: the column of tokens if nothing else is needed.
    """
    parts: list[tuple[Decoded, np.ndarray | None]] = []
    for unit, rows in picked:
        block = kept(of, unit, tokens)
        if block.corrupt is None:
            parts.append((block, rows))
            continue
        corrupt = block.corrupt[rows]
        others = np.flatnonzero(corrupt != corrupt[0])
        some = rows[: others[0]] if len(others) else rows
        if not corrupt[0]:
            parts.append((block, some))
            if len(others):
                break
        elif parts:
            break
        else:
            first = int(some[0])
            which = f"row {first}"
            if len(some) > 1:
                which = f"rows {first} and {len(some) - 1} more"
            return source.corrupt(
                f"{of.place(unit)}, {which}", block.why(first), num_records=len(some)
            )
    return Picked(parts)


class _Kept:
    """The decoded blocks that were used last."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Keeps none; also after a fork, when another thread may hold the lock."""
        self._lock = threading.Lock()
        self._blocks: collections.OrderedDict[Hashable, Decoded]
        self._blocks = collections.OrderedDict()
        self._num_bytes = 0

    def get(self, of: Any, unit: units.Unit, tokens: str) -> Decoded:
        key = (of.files[unit.file], unit.block, of.columns, tokens)
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
                return found
        made = of.decoded(unit, tokens=tokens)
        with self._lock:
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
            self._num_bytes = 0


_KEPT = _Kept()
files.register_cache(_KEPT.clear)
os.register_at_fork(after_in_child=_KEPT.begin)


def kept(of: Any, unit: units.Unit, tokens: str) -> Decoded:
    """The block of a unit, decoded now if it is not kept.

    Args:
      of: the source, with the attributes `files` and `columns` and a method `decoded`.
      unit: in the block.
      tokens: the column of tokens if nothing else is needed.
    """
    return _KEPT.get(of, unit, tokens)
