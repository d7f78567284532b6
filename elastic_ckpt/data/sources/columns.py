"""Arrow batches as blocks of records."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import tokens as token_numbers
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
    """The records of a sound batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch, self.num_bytes = batch, batch.nbytes
        self._lists: dict[str, _Lists | None] = {}

    def elements(self, rows: Sequence[int]) -> list[source.Element]:
        """See `Block`."""
        if isinstance(rows, range) and rows.step == 1:
            batch = self._batch.slice(rows.start, len(rows))
        else:
            batch = self._batch.take(list(rows))
        names = batch.schema.names
        values = zip(*map(_values, batch.columns), strict=True)
        return [dict(zip(names, row, strict=True)) for row in values]

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray]:
        """See `Block`."""
        if column not in self._lists:
            self._lists[column] = self._made_lists(column)
        lists = self._lists[column]
        if lists is None:
            return super().tokens(column, rows)
        values, begins, ends = lists
        # A view would keep the block in memory.
        return [values[begins[row] : ends[row]].copy() for row in rows]

    def _made_lists(self, column: str) -> _Lists | None:
        # Lists of tokens; None if the column has other values.
        import pyarrow as pa

        if column not in self._batch.schema.names:
            return None
        of = self._batch.column(column)
        if not _is_numbers(of.type) or not pa.types.is_integer(of.type.value_type):
            return None
        offsets, values = _numbers(of)
        try:
            values = token_numbers.narrowed(values, place="")
        except errors.DataError:
            return None
        begins = offsets[:-1] - offsets[0]
        lengths = np.diff(offsets)
        if of.null_count:
            lengths[np.asarray(of.is_null())] = 0
        return values, begins.tolist(), (begins + lengths).tolist()


# The values of all lists, and where each begins and ends.
_Lists: TypeAlias = tuple[np.ndarray, list[int], list[int]]


def checked(batch: pa.RecordBatch, place: str) -> source.Block:
    """The records of a batch; none if one of them cannot be as it is."""
    try:
        return Columns(sound(batch))
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


def _numbers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    # The offsets and the values of lists of numbers, with 0 for a null.
    offsets, numbers = _offsets_and_values(column)
    return offsets, np.asarray(numbers.fill_null(0) if numbers.null_count else numbers)


def _values(column: pa.Array) -> Iterator[Any]:
    kind = column.type
    if _is_numbers(kind):
        offsets, values = _numbers(column)
        bounds = itertools.pairwise((offsets - offsets[0]).tolist())
        missing = column.is_null().to_pylist()
        return (
            None if gone else values[begin:end]
            for (begin, end), gone in zip(bounds, missing, strict=True)
        )
    if _is_number(kind):
        # The type must not depend on whether another row of the batch is null.
        numbers = np.asarray(column.fill_null(0))
        missing = column.is_null().to_pylist()
        return (None if gone else n for n, gone in zip(numbers, missing, strict=True))
    return iter(column.to_pylist())


def _is_numbers(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
