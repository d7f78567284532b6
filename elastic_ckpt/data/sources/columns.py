"""Arrow batches as blocks of records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.data.sources import source

if TYPE_CHECKING:
    import pyarrow as pa


class DamagedError(Exception):
    """Bytes that Arrow cannot decode, or values that nobody wrote."""


@contextlib.contextmanager
def damaged(error_of: Callable[[object], Exception] = DamagedError) -> Iterator[None]:
    """Converts Arrow's errors of bytes that it cannot decode.

    Args:
      error_of: makes the error to raise instead.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError) as error:
        # Arrow also raises OSError for such bytes, but without an errno.
        bare = type(error) is OSError and error.errno is None
        if isinstance(error, OSError) and not bare:
            raise
        raise error_of(error) from None


class Columns(source.Block):
    """The records of a sound batch.

    Args:
      batch: the records.
      is_mapped: whether they are those of a file; otherwise lists of whole numbers are
        held in as few bits as they need.
    """

    def __init__(self, batch: pa.RecordBatch, *, is_mapped: bool = False) -> None:
        self._columns = {
            name: _Numbers(column, is_mapped=is_mapped)
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

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray]:
        """See `Block`."""
        lists = self._columns.get(column)
        if isinstance(lists, _Numbers) and lists.held.dtype in _TOKEN_TYPES:
            return lists.views(rows)
        return super().tokens(column, rows)


class _Numbers:
    # A column of lists of numbers; those of none are empty.
    def __init__(self, column: pa.Array, *, is_mapped: bool) -> None:
        offsets, numbers = _offsets_and_values(column)
        # Those of a list that is missing may be null.
        held = np.asarray(numbers.fill_null(0) if numbers.null_count else numbers)
        self._dtype = held.dtype
        self.held = (
            held if is_mapped and held.dtype in _TOKEN_TYPES else _narrowed(held)
        )
        begins, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
        self._missing = np.asarray(column.is_null())
        ends[self._missing] = begins[self._missing]
        # Their numbers are Python's, which slice twice as fast as NumPy's.
        self._begins, self._ends = begins.data, ends.data

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


# What tokens are held in.
_TOKEN_TYPES = (np.uint16, np.int32)


def _narrowed(numbers: np.ndarray) -> np.ndarray:
    # In the first of these types that holds all of them.
    if not np.issubdtype(numbers.dtype, np.integer):
        return numbers
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    for kind in _TOKEN_TYPES:
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return numbers.astype(kind, copy=False)
    return numbers


def checked(
    batch: pa.RecordBatch, place: str, *, is_mapped: bool = False
) -> source.Block:
    """The records of a batch; none if one of them cannot be as it is."""
    try:
        return Columns(sound(batch), is_mapped=is_mapped)
    except DamagedError as error:
        return source.LostBlock(place, error)


def sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch itself, checked.

    Raises:
      DamagedError: if a row cannot be converted to an element.
    """
    with damaged():
        # A damaged page may decode to offsets out of bounds or to invalid text.
        batch.validate(full=True)
    for column in batch.columns:
        # NumPy arrays of numbers cannot have nulls. A row without a list is valid.
        if _is_numbers(column.type) and column.null_count < len(column):
            _, values = _offsets_and_values(column)
            if values.null_count:
                raise DamagedError("a list of numbers has a null in it")
    return batch


def _offsets_and_values(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    # For a slice of a table, only the values of the slice.
    offsets = column.offsets.to_numpy()
    first, stop = offsets[0], offsets[-1]
    return offsets, column.values.slice(first, stop - first)


def _values(column: pa.Array, rows: Sequence[int]) -> Iterator[Any]:
    import pyarrow as pa

    some = column.take(pa.array(rows, pa.int64()))
    if _is_number(some.type):
        # The type must not depend on whether another row of the batch is null.
        numbers = np.asarray(some.fill_null(0))
        missing = some.is_null().to_pylist()
        return (None if gone else n for n, gone in zip(numbers, missing, strict=True))
    return iter(some.to_pylist())


def _is_numbers(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
