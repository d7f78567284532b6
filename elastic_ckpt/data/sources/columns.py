"""Arrow batches as blocks of records."""

from __future__ import annotations

import contextlib
import itertools
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
    """The records of a sound batch, with lists of tokens in as few bits as they need.

    Args:
      batch: the records.
      is_mapped: whether they are those of a file, and only what has no type for tokens
        is converted.
    """

    def __init__(self, batch: pa.RecordBatch, *, is_mapped: bool = False) -> None:
        self._schema = batch.schema
        self._columns = [
            column if is_mapped and _has_tokens(column.type) else _narrowed(column)
            for column in batch.columns
        ]
        self.num_bytes = sum(column.nbytes for column in self._columns)
        self._lists: dict[str, tuple[np.ndarray, ...] | None] = {}

    def elements(self, rows: Sequence[int]) -> list[source.Element]:
        """See `Block`."""
        import pyarrow as pa

        index = pa.array(rows, pa.int64())
        columns = [
            column.take(index).cast(kind)
            for column, kind in zip(self._columns, self._schema.types, strict=True)
        ]
        values = zip(*map(_values, columns), strict=True)
        return [dict(zip(self._schema.names, row, strict=True)) for row in values]

    def tokens(self, column: str, rows: Sequence[int]) -> list[np.ndarray]:
        """See `Block`."""
        if column not in self._lists:
            self._lists[column] = self._made_lists(column)
        lists = self._lists[column]
        if lists is None:
            return super().tokens(column, rows)
        values, begins, ends = lists
        if isinstance(rows, range):
            some: Any = slice(rows.start, rows.stop, rows.step)
        else:
            some = rows
        # A view would keep the block in memory.
        return [
            values[begin:end].copy()
            for begin, end in zip(
                begins[some].tolist(), ends[some].tolist(), strict=True
            )
        ]

    def _made_lists(self, column: str) -> tuple[np.ndarray, ...] | None:
        # Lists of tokens: all values, and where each begins and ends.
        if column not in self._schema.names:
            return None
        of = self._columns[self._schema.names.index(column)]
        if not _has_tokens(of.type):
            return None
        offsets, values = _numbers(of)
        begins, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
        ends[np.asarray(of.is_null())] = begins[np.asarray(of.is_null())]
        return values, begins, ends


def _token_types() -> tuple[pa.DataType, ...]:
    import pyarrow as pa

    return pa.uint16(), pa.int32()


def _has_tokens(kind: pa.DataType) -> bool:
    return _is_numbers(kind) and kind.value_type in _token_types()


def _narrowed(column: pa.Array) -> pa.Array:
    # Lists of whole numbers, of the smallest type for tokens that they fit into.
    import pyarrow as pa

    if _is_numbers(column.type) and pa.types.is_integer(column.type.value_type):
        is_large = pa.types.is_large_list(column.type)
        for kind in _token_types():
            with contextlib.suppress(pa.ArrowInvalid):
                return column.cast((pa.large_list if is_large else pa.list_)(kind))
    return column


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
