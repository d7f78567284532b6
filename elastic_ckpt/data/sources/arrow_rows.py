"""Rows of Arrow batches as elements: dicts of columns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
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


def elements(batch: pa.RecordBatch) -> Iterator[source.Element]:
    """The rows of a sound batch."""
    names = batch.schema.names
    for row in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(names, row, strict=True))


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


def tokens(column: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Lists of whole numbers as columns: values, and the start and length of each list.

    A list that is null has the length 0. None if the column has other values.
    """
    import pyarrow as pa

    if not _is_numbers(column.type) or not pa.types.is_integer(column.type.value_type):
        return None
    offsets, values = _numbers(column)
    start = offsets[:-1].astype(np.int64) - int(offsets[0])
    length = np.diff(offsets).astype(np.int64)
    if column.null_count:
        length[np.asarray(column.is_null())] = 0
    return values, start, length


def _offsets_and_values(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    # For a slice of a table, only the values of the slice.
    offsets = column.offsets.to_numpy()
    first, stop = offsets[0], offsets[-1]
    return offsets, column.values.slice(first, stop - first)


def _numbers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    # The offsets and the values of lists of numbers, with 0 for a null.
    offsets, numbers = _offsets_and_values(column)
    values = np.asarray(numbers.fill_null(0) if numbers.null_count else numbers)
    if len(numbers) < len(column.values):
        # A view would keep the whole table in memory.
        values = values.copy()
    return offsets, values


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
