"""Reads files of `torch.save` without torch, and without running anything in them.

Such a file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are
views of storages, and `data/<key>`, the bytes of each storage. `plain_pickle` decodes
the pickle. A tensor becomes a `Tensor`, a record of where its values lie.

Nothing in the file is trusted: a tensor must lie inside its storage and may not be
larger than it, and what is decoded must have its CRC-32, if the file was written with
any.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import IO, Any

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import (
    coverage,
    opened,
    plain_pickle,
    plain_values,
    source_files,
    stored_zip,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.stored_zip import ZipEntry
from elastic_ckpt.universal.stored import Checksum, Fragment

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
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
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
# Names of dtypes, by those of storages.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
# What names of PyTorch in a pickle stand for.
NAMES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
_KINDS = {
    **{f"torch.{name}": DTYPES[dtype] for name, dtype in STORAGES.items()},
    **{f"torch.storage.{name}": DTYPES[dtype] for name, dtype in STORAGES.items()},
}

MOST_PICKLE_BYTES = 256 << 20
_WRITER = "torch.save"
# torch.save writes 3; later numbers are TorchScript's.
_VERSIONS = range(1, 11)
# The version and the byte order are short.
_MOST_TEXT_BYTES = 100
# Bytes of tensors, over those of their file: a few may share a storage.
_MOST_SHARING = 4
# Files of a bucket take long to answer.
_THREADS = 8
# A stored tensor and its fragment, without their dims; each of the dims.
_TENSOR_BYTES = 400
_DIM_BYTES = 80


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      dtype: as NumPy has it.
      shape: in elements.
      view: see `StoredTensor.view`.
      path: of the file.
      entry: of the zip, which holds its storage.
      file_offset: the byte of the file at which its first element is.
      byte_strides: the bytes from an element to the next, by dim.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    view: str
    path: str
    entry: ZipEntry
    file_offset: int
    byte_strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The values, in memory of this process.

        Raises:
          FormatError: if its storage has another CRC-32.
        """
        return _read([self])[self]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile:
    """A file that was read and closed.

    Attributes:
      path: its path or URL.
      value: dicts, lists, numbers and texts, and `Tensor`s.
      budget: of the checkpoint.
    """

    path: str
    value: Any
    budget: SourceBudget = dataclasses.field(
        default_factory=SourceBudget, repr=False, compare=False
    )

    def at(self, *keys: str) -> Any:
        """The value under nested dicts; None if one of them lacks the key."""
        value = self.value
        for key in keys:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    def dict_at(self, *keys: str) -> dict[Any, Any]:
        """The dict under nested dicts.

        Raises:
          FormatError: if there is none.
        """
        return self._of_type(dict, "dict", keys)

    def list_at(self, *keys: str) -> list[Any]:
        """The list under nested dicts.

        Raises:
          FormatError: if there is none.
        """
        return self._of_type(list, "list", keys)

    def _of_type(self, kind: type, name: str, keys: tuple[str, ...]) -> Any:
        value = self.at(*keys)
        if not isinstance(value, kind):
            raise self.error(f"has no {name} {'/'.join(keys) or 'at its top'}")
        return value

    def error(self, what: str) -> FormatError:
        """An error that names the file; `what` continues its sentence."""
        return FormatError(f"{self.path} {what}")

    def take(self, num_bytes: int) -> None:
        """Counts memory that is allocated for what the file has.

        Raises:
          FormatError: if it is too much.
        """
        self.budget.take(num_bytes, self.path)

    def values(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Its numbers and texts by path, see `plain_values.flatten`.

        Raises:
          FormatError: if they take too much memory.
        """
        return plain_values.flatten(
            self.value, file=self.path, without=without, budget=self.budget
        )

    def fragment(self, tensor: Tensor) -> tuple[Fragment, ...]:
        """The place of a tensor: one fragment, or none if it is empty.

        Raises:
          FormatError: if the tensors of the checkpoint take too much memory.
        """
        # A tensor may be referred to by many names.
        self.take(_TENSOR_BYTES + _DIM_BYTES * len(tensor.shape))
        if 0 in tensor.shape:
            return ()
        return (
            Fragment(
                box=coverage.whole(tensor.shape),
                file=self.path,
                offset=tensor.file_offset,
                strides=tensor.byte_strides,
            ),
        )


def read(
    path: epath.PathLike,
    budget: SourceBudget | None = None,
    *,
    span: tuple[int, int] | None = None,
    with_views: bool = False,
) -> TorchFile:
    """The structure of a file.

    Args:
      path: local, or in a bucket.
      budget: of the checkpoint; None if this is all that is read.
      span: the first byte of the zip and its size; None if it is the whole file.
      with_views: whether tensors whose `conj` or `neg` bit is set are read, too; then
        the caller has to tell them from others.

    Raises:
      FormatError: if it is no such file, damaged, or made to exhaust memory.
    """
    budget = budget or SourceBudget()
    with source_files.opened(path) as file:
        zipped = _Zip(file, str(path), span)
        budget.add_file(zipped.stored_bytes)
        content = zipped.pickle()
    value = plain_pickle.value(
        content,
        file=str(path),
        budget=budget,
        names=NAMES,
        tensor=tensor_of(str(path), zipped.entries, zipped.prefix, with_views),
    )
    return TorchFile(path=str(path), value=value, budget=budget)


def read_all(
    paths: Mapping[Any, epath.Path], budget: SourceBudget, *, with_views: bool = False
) -> dict[Any, TorchFile]:
    """The structures of files, by the keys of `paths`; see `read`.

    Raises:
      FormatError: as `read`.
    """
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        reading = threads.map(
            lambda path: read(path, budget, with_views=with_views), paths.values()
        )
        return dict(zip(paths, reading, strict=True))


def read_arrays(path: epath.PathLike, budget: SourceBudget | None = None) -> Any:
    """The content of a file, with arrays in place of tensors.

    Args:
      path: local, or in a bucket.
      budget: of its checkpoint; None if this is all that is read.

    Raises:
      FormatError: as `read`, or if a part of the file has another CRC-32.
    """
    file = read(path, budget, with_views=True)
    views = list(dict.fromkeys(tensor for _, tensor in tensors(file.value)))
    num_bytes = sum(tensor.num_bytes for tensor in views)
    file_bytes = epath.Path(path).stat().length
    if num_bytes > _MOST_SHARING * file_bytes:
        raise file.error(
            f"has {num_bytes} bytes of tensors in {file_bytes} bytes: they overlap;"
            " clone them before they are saved"
        )
    return _with_arrays(file.value, _read(views))


def checksums(path: str) -> Sequence[Checksum]:
    """The CRC-32 of everything in a file; none if it was written without.

    Raises:
      FormatError: if it is no file of torch.save.
    """
    with source_files.opened(path) as file:
        entries = [
            each for each in _Zip(file, path, None).entries.values() if each.size
        ]
    if not any(each.crc for each in entries):
        return ()
    return [Checksum(each.start, each.start + each.size, each.crc) for each in entries]


def verify(path: str) -> bool:
    """Compares the CRC-32 of everything in a file; False if it has none.

    Raises:
      FormatError: if a part of the file has another one.
    """
    listed = checksums(path)
    opened.compare(path, listed)
    return bool(listed)


def tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor of a decoded value, with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors(each, (*path, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from tensors(each, (*path, number))


def tensors_of(value: Any) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a flat state dict, by name."""
    if isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, Tensor) and isinstance(name, str):
                yield name, each


def tensor_of(
    path: str, entries: Mapping[str, ZipEntry], prefix: str, with_views: bool
) -> Callable[[Sequence[Any]], Tensor]:
    """Makes tensors of the rows of `plain_pickle.value`.

    Args:
      path: of the file.
      entries: of the zip.
      prefix: the directory of all entries.
      with_views: see `read`.

    Returns:
      A function that raises ValueError if a tensor does not lie inside its storage, or
      is larger than it.
    """

    def tensor(row: Sequence[Any]) -> Tensor:
        kind, key, num_elements, offset, shape, strides, name, view = row
        held = _KINDS.get(kind)
        entry = entries.get(f"{prefix}data/{key}")
        if entry is None:
            raise ValueError(f"the file has no entry data/{key[:40]}")
        dtype = held if name is None else NAMES.get(name)
        if dtype is None:
            raise ValueError(f"its type is {(name or kind)[:60]}, which is not read")
        width = 1 if held is None else held.itemsize
        if num_elements * width != entry.size:
            raise ValueError(
                f"data/{key} has {entry.size} bytes, and {num_elements} elements take"
                f" {num_elements * width}"
            )
        if view and not with_views:
            raise ValueError(
                f"its {view} bit is set, which is not read here; call"
                f" resolve_{view.split()[0]}() before it is saved"
            )
        _check_inside(entry.size, offset, shape, strides, dtype)
        is_empty = 0 in shape
        return Tensor(
            dtype=dtype,
            shape=tuple(shape),
            view=view,
            path=path,
            entry=entry,
            file_offset=entry.start + (0 if is_empty else offset * dtype.itemsize),
            byte_strides=tuple(stride * dtype.itemsize for stride in strides),
        )

    return tensor


def _check_inside(
    num_bytes: int,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: np.dtype,
) -> None:
    if len(shape) != len(strides) or len(shape) > coverage.MOST_DIMS:
        raise ValueError(f"it has {len(shape)} dims and {len(strides)} strides")
    for each in (offset, *shape, *strides):
        if type(each) is not int or not 0 <= each < 1 << 63:
            raise ValueError("a dim, stride or offset is no number from 0 up")
    if num_bytes % dtype.itemsize:
        raise ValueError(f"its storage is no multiple of {dtype.itemsize} bytes")
    if math.prod(filter(None, shape)) > coverage.MOST_ELEMENTS:
        raise ValueError(f"shape {tuple(shape)} is too large")
    held, count = num_bytes // dtype.itemsize, math.prod(shape)
    last = offset + sum(
        (dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)
    )
    if count > held or (count and last >= held):
        raise ValueError(
            f"shape {tuple(shape)}, strides {tuple(strides)} and offset {offset} are"
            f" not inside {held} elements; a tensor that was expanded has to be cloned"
            " before it is saved"
        )


class _Zip:
    """The zip of an open file of torch.save, or a part of the file."""

    def __init__(
        self, file: IO[bytes], path: str, span: tuple[int, int] | None
    ) -> None:
        self._file = file
        self._path = path
        num_bytes = file.seek(0, 2)
        begin, size = span or (0, num_bytes)
        self.stored_bytes = min(size, source_files.num_stored_bytes(path, num_bytes))
        self.entries = stored_zip.entries(
            self._read,
            begin=begin,
            size=size,
            stored_bytes=self.stored_bytes,
            place=f"{path} (from byte {begin})" if begin else path,
            writer=_WRITER,
        )
        pickles = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{path} has no data.pkl; it is no file of {_WRITER}")
        self.prefix = pickles[0].removesuffix("data.pkl")

    def pickle(self) -> bytes:
        """The pickle, of a version and a byte order that are read."""
        version = self._short("version")
        if version is not None:
            text = version.strip()
            if not text.isdigit() or int(text[:9]) not in _VERSIONS:
                raise FormatError(
                    f"{self._path} has version {text[:20]!r}, and this program reads"
                    f" {_VERSIONS[0]} to {_VERSIONS[-1]}; save it with an older torch"
                )
        order = self._short("byteorder")
        if order not in (None, b"little"):
            raise FormatError(
                f"{self._path} has the byte order {order[:20]!r}; only little is read:"
                " save it anew on a little-endian machine"
            )
        size = self.entries[self.prefix + "data.pkl"].size
        most = min(MOST_PICKLE_BYTES, self.stored_bytes)
        if size > most:
            raise FormatError(
                f"{self._path} has a pickle of {size} bytes; at most {most} are read,"
                " of those that are no holes"
            )
        return self._checked("data.pkl")

    def _short(self, name: str) -> bytes | None:
        entry = self.entries.get(self.prefix + name)
        if entry is None:
            return None
        if entry.size > _MOST_TEXT_BYTES:
            raise FormatError(
                f"{self._path} has {entry.size} bytes in {self.prefix}{name}, and at"
                f" most {_MOST_TEXT_BYTES} are read"
            )
        return self._checked(name)

    def _checked(self, name: str) -> bytes:
        entry = self.entries[self.prefix + name]
        content = self._read(entry.start, entry.size)
        has_crc = any(each.crc for each in self.entries.values())
        if len(content) != entry.size or (has_crc and zlib.crc32(content) != entry.crc):
            raise FormatError(
                f"{self._path} is damaged: {self.prefix}{name} has another CRC-32 than"
                f" {entry.crc:08x}; copy it again from the place that it was written to"
            )
        return content

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _read(views: Iterable[Tensor]) -> dict[Tensor, np.ndarray]:
    # The values of tensors, of storages that are compared with their CRC-32.
    arrays = {}
    by_entry: dict[tuple[str, ZipEntry], list[Tensor]] = {}
    for each in views:
        by_entry.setdefault((each.path, each.entry), []).append(each)
    for (path, entry), held in by_entry.items():
        with source_files.opened(path) as file:
            file.seek(entry.start)
            content = file.read(entry.size)
        is_same = len(content) == entry.size and zlib.crc32(content) == entry.crc
        if not is_same and (entry.crc or checksums(path)):
            raise FormatError(
                f"{path} is damaged: bytes {entry.start} to"
                f" {entry.start + entry.size} have another CRC-32 than"
                f" {entry.crc:08x}; copy it again from the place that it was"
                " written to"
            )
        for each in held:
            arrays[each] = _array(content, each)
    return arrays


def _array(content: bytes, tensor: Tensor) -> np.ndarray:
    if not math.prod(tensor.shape):
        return np.empty(tensor.shape, tensor.dtype)
    array = np.ndarray(
        tensor.shape,
        tensor.dtype,
        content,
        tensor.file_offset - tensor.entry.start,
        tensor.byte_strides,
    )
    array = np.array(array, order="C")
    array = array.conj() if "conj" in tensor.view else array
    return -array if "neg" in tensor.view else array


def _with_arrays(value: Any, arrays: Mapping[Tensor, np.ndarray]) -> Any:
    if isinstance(value, Tensor):
        return arrays[value]
    if isinstance(value, dict):
        return {key: _with_arrays(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_arrays(each, arrays) for each in value)
    return value
