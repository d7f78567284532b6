"""Tensors in files of `torch.save`: views of storages, which are entries of a zip."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from elastic_ckpt.universal.formats import coverage
from elastic_ckpt.universal.formats.zip_directory import Entry

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "int64": np.int64,
        "int32": np.int32,
        "int16": np.int16,
        "int8": np.int8,
        "uint64": np.uint64,
        "uint32": np.uint32,
        "uint16": np.uint16,
        "uint8": np.uint8,
        "bool": np.bool_,
        "complex64": np.complex64,
        "complex128": np.complex128,
    }.items()
}


class Zip(Protocol):
    """A zip that holds storages."""

    @property
    def path(self) -> str:
        """The path of its file."""
        ...

    def entry(self, name: str) -> Entry:
        """The place of an entry, which the zip must have."""
        ...

    def size(self, name: str) -> int | None:
        """The bytes of an entry; None if there is none."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an entry."""
        ...


@dataclasses.dataclass(frozen=True)
class StorageKind:
    """A class of storages.

    Attributes:
      dtype: of its elements; None for bytes, whose tensors have each a dtype.
    """

    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class Storage:
    """The elements of tensors.

    Attributes:
      file: that holds them.
      entry: of the zip.
      dtype: of its elements; None for bytes.
      num_bytes: of the entry.
    """

    file: Zip
    entry: str
    dtype: np.dtype | None
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file: its type and shape; `read` reads its values.

    Attributes:
      dtype: as NumPy has it.
      shape: in elements.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    _storage: Storage = dataclasses.field(repr=False)
    _offset: int = dataclasses.field(repr=False)
    _strides: tuple[int, ...] = dataclasses.field(repr=False)

    def read(self) -> np.ndarray:
        """The values, in memory of this process.

        Raises:
          FormatError: if the file was closed, or its bytes have another CRC-32.
        """
        width, storage = self.dtype.itemsize, self._storage
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        steps = zip(self.shape, self._strides, strict=True)
        last = self._offset + sum((dim - 1) * stride for dim, stride in steps)
        content = storage.file.read(
            storage.entry, self._offset * width, (last + 1) * width
        )
        view = np.lib.stride_tricks.as_strided(
            np.frombuffer(content, self.dtype),
            self.shape,
            [stride * width for stride in self._strides],
            writeable=False,
        )
        return np.array(view, order="C")

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def entry(self) -> str:
        """The name of the entry that has its values."""
        return self._storage.entry

    @property
    def entry_offset(self) -> int:
        """The byte of the entry at which its first element is."""
        return self._offset * self.dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """The size of the entry."""
        return self._storage.num_bytes

    @property
    def file_offset(self) -> int:
        """The byte of the file at which its first element is."""
        return self._storage.file.entry(self.entry).start + self.entry_offset

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """The bytes from an element to the next, by dim."""
        return tuple(stride * self.dtype.itemsize for stride in self._strides)


def storages(file: Zip, prefix: str) -> Callable[[Any], Any]:
    """Makes storages of the persistent ids in a pickle.

    Args:
      file: that has the pickle.
      prefix: the directory of all entries.

    Returns:
      A function that raises ValueError for an id of no storage.
    """

    def storage(persistent_id: Any) -> Storage:
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            raise ValueError("it is no tuple of five")
        tag, kind, key, _, num_elements = persistent_id
        if tag != "storage" or not isinstance(kind, StorageKind):
            raise ValueError("it names no storage")
        if not isinstance(key, str) or type(num_elements) is not int:
            raise ValueError("its key is no text or its size no number")
        entry = f"{prefix}data/{key}"
        size = file.size(entry)
        if size is None:
            raise ValueError(f"the file has no entry data/{key[:40]}")
        width = 1 if kind.dtype is None else kind.dtype.itemsize
        if num_elements * width != size:
            raise ValueError(
                f"data/{key} has {size} bytes, and {num_elements} elements take"
                f" {num_elements * width}"
            )
        return Storage(file, entry, kind.dtype, size)

    return storage


def view(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: np.dtype | None
) -> Tensor:
    """A tensor, which must lie inside its storage and be no larger.

    Raises:
      ValueError: if it is none.
    """
    if not isinstance(storage, Storage) or dtype is None:
        raise ValueError("it has no storage, or no type")
    if type(shape) is not tuple or type(strides) is not tuple:
        raise ValueError("its shape and strides are no tuples")
    if len(shape) != len(strides) or len(shape) > coverage.MOST_DIMS:
        raise ValueError(f"it has {len(shape)} dims and {len(strides)} strides")
    for each in (*shape, *strides):
        number(each, "a dim or stride")
    if storage.num_bytes % dtype.itemsize:
        raise ValueError(f"its storage is no multiple of {dtype.itemsize} bytes")
    held = storage.num_bytes // dtype.itemsize
    count = math.prod(shape)
    if math.prod(filter(None, shape)) > coverage.MOST_ELEMENTS:
        raise ValueError(f"shape {shape} is too large")
    last = number(offset, "its offset") + sum(
        (dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)
    )
    if count > held or (count and last >= held):
        raise ValueError(
            f"shape {shape}, strides {strides} and offset {offset} are not inside"
            f" {held} elements; a tensor that was expanded has to be cloned before it"
            " is saved"
        )
    return Tensor(
        dtype=dtype,
        shape=shape,
        _storage=storage,
        _offset=offset if count else 0,
        _strides=strides,
    )


def number(value: Any, what: str) -> int:
    """The value, which must be a number from 0 up.

    Raises:
      ValueError: if it is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is no number from 0 up")
    return value
