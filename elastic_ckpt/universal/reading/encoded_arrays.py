"""Reads stored tensors whose bytes are encoded, through TensorStore.

A part of an array is a file of its name, with the part's elements in row-major order.
So plans treat it as any file, and each part is decoded once. It is a chunk, or several
if they are small. TensorStore holds a chunk twice while it decodes it, as it was stored
and decoded, and caches none. Each of its threads that decode has an arena of glibc,
which keeps some of the freed memory: so it counts, and half of the processors decode,
while the others copy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import Fragment, StoredTensor
from elastic_ckpt.universal.plan.spans import Limits
from elastic_ckpt.universal.reading import byte_source
from elastic_ckpt.universal.strides import row_major

if TYPE_CHECKING:
    import tensorstore as ts

# A part is one request, whatever is needed of it.
LIMITS = Limits(gap_bytes=2**62, span_bytes=2**62, alone_bytes=2**62)

# Small chunks are read together up to this size.
_PART_BYTES = 2**24
# Nodes of the indices of OCDBT.
_INDEX_BYTES = 2**25
_CHUNKS = "cache_pool#chunks"
# glibc keeps memory of this many bytes at most for a thread: it returns blocks of over
# 32 MiB at once.
_ARENA_BYTES = 2**26
# The parts of all arrays, and of each: shapes may be large where no values are.
_MOST_PARTS, _MOST_PARTS_OF_EACH = 2**20, 2**4
# Arrays are opened at a time, since each waits for storage.
_OPENED_AT_ONCE = 256


class EncodedArrays(byte_source.ByteSource):
    """The arrays of some stored tensors; any number of threads may read them.

    Args:
      tensors: of a checkpoint.
      used: the numbers of those that are read; the others are not opened.

    Raises:
      CheckpointError: if an array cannot be opened, or is not as its tensor is.
    """

    def __init__(self, tensors: Sequence[StoredTensor], used: Iterable[int]) -> None:
        self._parts: dict[str, tuple[ts.TensorStore, Box]] = {}
        self.tensors = list(tensors)
        numbers = [number for number in used if tensors[number].spec is not None]
        arrays = _opened([tensors[number] for number in numbers])
        self._most_parts = _MOST_PARTS + _MOST_PARTS_OF_EACH * len(numbers)
        for number, array in zip(numbers, arrays, strict=True):
            self.tensors[number] = self._in_parts(number, tensors[number], array)

    def __contains__(self, file: str) -> bool:
        """Whether `file` is a part of an array."""
        return file in self._parts

    def range_of(self, file: str, start: int, stop: int) -> tuple[int, int]:
        """See `ByteSource`."""
        array, box = self._parts[file]
        _, first, after = _rows(box, array.dtype.numpy_dtype.itemsize, start, stop)
        return first, after

    def request_bytes(self, file: str, num_bytes: int, *, is_direct: bool) -> int:
        """See `ByteSource`."""
        del num_bytes, is_direct
        # The stored chunk is freed before values are copied out of the decoded one.
        array, box = self._parts[file]
        held = 2 * box.volume * array.dtype.numpy_dtype.itemsize
        return held + min(held, _ARENA_BYTES)

    def read_into(self, file: str, start: int, parts: Sequence[np.ndarray]) -> int:
        """See `ByteSource`."""
        import tensorstore as ts

        array, box = self._parts[file]
        dtype = array.dtype.numpy_dtype
        num_bytes = sum(part.nbytes for part in parts)
        whole = parts[0] if len(parts) == 1 else np.empty(num_bytes, np.uint8)
        rows, _, _ = _rows(box, dtype.itemsize, start, start + whole.nbytes)
        values = whole.view(dtype).reshape(rows.shape)
        place = tuple(map(slice, rows.start, rows.stop))
        ts.array(values).write(array[place]).result()
        if whole is not parts[0]:
            byte_source.scatter(whole, parts)
        return whole.nbytes

    def _in_parts(
        self, number: int, tensor: StoredTensor, array: ts.TensorStore
    ) -> StoredTensor:
        dtype = array.dtype.numpy_dtype
        if tuple(array.shape) != tensor.shape or dtype != tensor.dtype:
            raise errors.CheckpointError(
                f"{tensor.name} is {dtype.name} {list(array.shape)} in its array, and"
                f" {tensor.dtype.name} {list(tensor.shape)} in the checkpoint's"
                " metadata; the checkpoint is damaged, use another step"
            )
        lengths = _part_shape(tensor.shape, _chunk(array), dtype.itemsize)
        fragments = []
        ranges = [
            range(0, size, length)
            for size, length in zip(tensor.shape, lengths, strict=True)
        ]
        num_parts = math.prod(map(len, ranges))
        if len(self._parts) + num_parts > self._most_parts:
            raise errors.CheckpointError(
                f"{tensor.name}, of shape {list(tensor.shape)}, has {num_parts} chunks,"
                f" and at most {self._most_parts} of all arrays are read; save it with"
                " larger chunks"
            )
        for start in itertools.product(*ranges):
            ends = zip(start, lengths, tensor.shape, strict=True)
            stop = tuple(min(at + length, size) for at, length, size in ends)
            box = Box(start=start, stop=stop)
            file = f"{number}: {tensor.name}{box}"
            self._parts[file] = array, box
            strides = row_major(box.shape, dtype.itemsize)
            fragments.append(Fragment(box=box, file=file, offset=0, strides=strides))
        return dataclasses.replace(tensor, fragments=tuple(fragments), spec=None)


def _opened(tensors: Sequence[StoredTensor]) -> list[ts.TensorStore]:
    if not tensors:
        return []
    import tensorstore as ts

    context = ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _INDEX_BYTES},
            _CHUNKS: {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": max(1, (os.cpu_count() or 1) // 2)},
        }
    )
    arrays: list[ts.TensorStore] = []
    for first in range(0, len(tensors), _OPENED_AT_ONCE):
        batch = tensors[first : first + _OPENED_AT_ONCE]
        opening = [_open(tensor.spec, context) for tensor in batch]
        for tensor, future in zip(batch, opening, strict=True):
            try:
                arrays.append(future.result())
            # Raised by TensorStore and by the file system.
            except (OSError, ValueError) as error:
                raise errors.CheckpointError(
                    f"{tensor.name} cannot be opened ({str(error).splitlines()[0]});"
                    " use another step, or restore the checkpoint from a copy"
                ) from error
    return arrays


def _open(spec: Any, context: ts.Context) -> ts.Future:
    import tensorstore as ts

    fixed = {**spec, "cache_pool": _CHUNKS}
    return ts.open(fixed, open=True, read=True, context=context)


def _chunk(array: ts.TensorStore) -> tuple[int, ...]:
    shape = array.chunk_layout.read_chunk.shape or array.shape
    return tuple(
        min(length or size, max(1, size))
        for length, size in zip(shape, array.shape, strict=True)
    )


def _part_shape(
    shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int
) -> list[int]:
    # The shape of parts: a chunk, or several in row-major order.
    lengths = list(chunk)
    for dim in reversed(range(len(shape))):
        most = _PART_BYTES // (int(np.prod(lengths)) * itemsize)
        chunks = -(-shape[dim] // chunk[dim])
        lengths[dim] = min(shape[dim], chunk[dim] * max(1, min(chunks, most)))
        if lengths[dim] < shape[dim]:
            break
    return lengths


def _rows(box: Box, itemsize: int, start: int, stop: int) -> tuple[Box, int, int]:
    # The smallest box of whole rows that holds a range of the bytes of a box, and the
    # range of its bytes.
    first: list[int] = []
    base = 0
    strides = row_major(box.shape, itemsize)
    for dim, stride in enumerate(strides):
        row, after = (start - base) // stride, -(-(stop - base) // stride)
        rest = dim + 1
        if after - row > 1 or rest == len(strides):
            lead = tuple(at + n for at, n in zip(box.start, first, strict=False))
            at = box.start[dim]
            rows = Box(
                start=(*lead, at + row, *box.start[rest:]),
                stop=(*(n + 1 for n in lead), at + after, *box.stop[rest:]),
            )
            return rows, base + row * stride, base + after * stride
        first.append(row)
        base += row * stride
    return box, 0, itemsize
