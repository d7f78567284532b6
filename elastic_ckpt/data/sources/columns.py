"""Arrow batches as blocks of records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import extras
from elastic_ckpt.data.sources import source

if TYPE_CHECKING:
    import pyarrow as pa


def pyarrow(part: str = "") -> Any:
    """`pyarrow`, or a part of it such as `.parquet`.

    Raises:
      ConfigError: if `pyarrow` is not installed.
    """
    return extras.module(
        f"pyarrow{part}", extra="parquet", otherwise="use files of another format"
    )


@contextlib.contextmanager
def damaged(error_of: Callable[[object], Exception]) -> Iterator[None]:
    """Converts the errors that Arrow raises for bytes that it cannot decode."""
    pa = pyarrow()
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError) as error:
        # For such bytes, Arrow also raises OSError, but without an errno.
        bare = type(error) is OSError and error.errno is None
        if isinstance(error, MemoryError | OSError) and not bare:
            raise
        raise error_of(error) from None


class Columns(source.Block):
    """The records of a batch, with lists of integers in a narrow type.

    Args:
      batch: the records.
      corrupt: a function that creates the error for an invalid value.
      is_mapped: whether the batch is mapped from a file and uses no memory of its own.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        corrupt: Callable[[object], Exception],
        *,
        is_mapped: bool = False,
    ) -> None:
        self._columns = {
            name: _Numbers(column, corrupt, is_mapped)
            if _is_numbers(column.type)
            else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        self.num_bytes = sum(column.nbytes for column in self._columns.values())

    def elements(self, rows: Sequence[int]) -> list[source.Element]:
        """See `Block`."""
        values = [
            column.values(rows)
            if isinstance(column, _Numbers)
            else _values(column, rows)
            for column in self._columns.values()
        ]
        return [
            dict(zip(self._columns, row, strict=True))
            for row in zip(*values, strict=True)
        ]

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray] | None:
        """See `Block`."""
        lists = self._columns.get(column)
        if isinstance(lists, _Numbers) and lists.are_tokens:
            return lists.views(rows)
        return None


def checked(
    batch: pa.RecordBatch,
    corrupt: Callable[[object], Exception],
    *,
    is_mapped: bool = False,
) -> Columns:
    """Validates a batch that may be damaged, and returns its records."""
    with damaged(corrupt):
        # A damaged page may decode to offsets out of bounds or to invalid text.
        batch.validate(full=True)
    return Columns(batch, corrupt, is_mapped=is_mapped)


class _Numbers:
    # A column of lists of numbers; nulls become empty lists.
    def __init__(
        self, column: Any, corrupt: Callable[[object], Exception], is_mapped: bool
    ) -> None:
        self._missing = np.asarray(column.is_null())
        if column.null_count:
            column = column.fill_null([])
        offsets = column.offsets.to_numpy()
        # A slice of a table has the values of the whole table.
        first, end = offsets[0], offsets[-1]
        numbers = column.values.slice(first, end - first)
        if numbers.null_count:
            raise corrupt("a list of numbers contains a null")
        held = np.asarray(numbers)
        self._dtype = held.dtype
        is_kept = is_mapped and held.dtype in _TOKEN_TYPES
        self.held = held if is_kept else _narrowed(held)
        # Whether all numbers may be tokens.
        self.are_tokens = self.held.dtype in _TOKEN_TYPES and held.min(initial=0) >= 0
        # Memoryviews return Python ints, which slice twice as fast as NumPy's.
        self._begins = (offsets[:-1] - first).data
        self._ends = (offsets[1:] - first).data

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + 2 * self._begins.nbytes

    def views(self, rows: Sequence[int]) -> list[np.ndarray]:
        begins, ends = self._begins, self._ends
        return [self.held[begins[row] : ends[row]] for row in rows]

    def values(self, rows: Sequence[int]) -> list[np.ndarray | None]:
        return [
            None if self._missing[row] else each.astype(self._dtype)
            for row, each in zip(rows, self.views(rows), strict=True)
        ]


# The types in which tokens are stored.
_TOKEN_TYPES = (np.uint16, np.int32)


def _narrowed(numbers: np.ndarray) -> np.ndarray:
    # Converts integers to the first of these types that can hold all of them.
    is_whole = numbers.dtype.kind in "iu"
    least, most = numbers.min(initial=0), numbers.max(initial=0)
    for kind in _TOKEN_TYPES if is_whole else ():
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return numbers.astype(kind, copy=False)
    return numbers


def _values(column: pa.Array, rows: Sequence[int]) -> list[Any]:
    some = column.take(np.array(rows, np.int64))
    if not _is_number(some.type):
        return some.to_pylist()
    # A value's type must not depend on whether another row is null.
    numbers, valid = some.fill_null(0).to_numpy(), some.is_valid().to_pylist()
    return [n if is_valid else None for n, is_valid in zip(numbers, valid, strict=True)]


def _is_numbers(kind: pa.DataType) -> bool:
    types = pyarrow().types
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    types = pyarrow().types
    return types.is_integer(kind) or types.is_floating(kind)
