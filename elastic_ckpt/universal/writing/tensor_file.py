"""A file of tensors of which boxes are written in any order, and read back."""

from __future__ import annotations

import mmap
import os
from types import TracebackType

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.universal.formats.safetensors_file import Span
from elastic_ckpt.universal.strides import row_major
from elastic_ckpt.universal.writing import direct_io

# Shorter runs are copied through mapped memory: a call for each would cost more.
_LEAST_RUN_BYTES = 2**16
# Longer ones go past the page cache.
_LEAST_DIRECT_BYTES = 2**20


class TensorFile:
    """A local file that is written at given places.

    All its bytes are reserved at once: storage that is full is an error here, not a
    signal in the midst of a copy.

    Args:
      path: of an existing file.
      num_bytes: its size to be.

    Raises:
      OSError: if there is no room.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self._path = path
        self._reader = direct_io.Reader()
        self._staging = np.empty(0, np.uint8)
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        self._map: mmap.mmap | None = None
        try:
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
            self._file.truncate(num_bytes)
            if num_bytes:
                self._map = mmap.mmap(self._file.fileno(), num_bytes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._map is not None:
            self._map.close()
        self._file.close()

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Writes bytes at a place."""
        rest = memoryview(content).cast("B")
        while rest:
            written = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[written:], offset + written

    def head(self, num_bytes: int) -> bytes:
        """The first bytes."""
        return os.pread(self._file.fileno(), num_bytes, 0)

    def put(self, span: Span, box: boxes.Box, values: np.ndarray) -> None:
        """Writes the values of a box of the tensor at `span`.

        Args:
          span: the place, dtype and shape of the tensor.
          box: with elements.
          values: of the box's shape and the tensor's dtype.
        """
        split = _first_of_run(span.shape, box)
        run_bytes = int(np.prod(box.shape[split:])) * span.dtype.itemsize
        if run_bytes < _LEAST_RUN_BYTES and box.volume > 1:
            self._mapped(span)[_slices(box)] = values
            return
        strides = np.array(row_major(span.shape, span.dtype.itemsize))
        for index in np.ndindex(*box.shape[:split]):
            place = np.array([*index, *(0,) * (len(box.shape) - split)]) + box.start
            run = np.ascontiguousarray(values[index]).reshape(-1).view(np.uint8)
            offset = span.start + int((place * strides).sum())
            if run_bytes < _LEAST_DIRECT_BYTES:
                self.write(run.data, offset)
                continue
            if self._staging.nbytes < run_bytes:
                self._staging = direct_io.allocate(run_bytes)
            direct_io.put(self._path, offset, run, self._staging)

    def get(self, span: Span, box: boxes.Box) -> np.ndarray:
        """The values of a box, as the file has them, until the next call."""
        num_bytes = box.volume * span.dtype.itemsize
        is_one_run = box.volume == int(
            np.prod(box.shape[_first_of_run(span.shape, box) :])
        )
        if num_bytes < _LEAST_DIRECT_BYTES or not is_one_run:
            return np.array(self._mapped(span)[_slices(box)])
        strides = row_major(span.shape, span.dtype.itemsize)
        offset = span.start + int(np.dot(box.start, strides))
        read = self._reader.read(self._path, offset, num_bytes)
        return read.view(span.dtype).reshape(box.shape)

    def _mapped(self, span: Span) -> np.ndarray:
        assert self._map is not None
        return np.ndarray(span.shape, span.dtype, self._map, span.start)


def _first_of_run(shape: tuple[int, ...], box: boxes.Box) -> int:
    # The first dim of those that lie in one piece: all behind it are whole.
    dim = len(shape)
    while dim and (dim == len(shape) or box.shape[dim] == shape[dim]):
        dim -= 1
    return dim


def _slices(box: boxes.Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))
