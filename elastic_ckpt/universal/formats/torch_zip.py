"""Reads files of `torch.save` without torch, and without running anything in them.

Such a file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are
views of storages, and `data/<key>`, the bytes of each storage. The pickle is decoded by
`closed_pickle`, with the names below alone. A tensor becomes a `Tensor`, a record that
reads its values when it is asked for them: memory holds one tensor at a time.

Nothing in the file is trusted. Entries must be uncompressed, lie inside the file and
not overlap; a tensor must lie inside its storage and may not be larger than it; the
bytes of an entry must have its CRC-32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import closed_pickle
from elastic_ckpt.universal.formats.closed_pickle import Call
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.stored_zip import StoredZip

MOST_PICKLE_BYTES = 256 << 20

# torch.save writes 3; later numbers are TorchScript's.
_VERSIONS = range(1, 11)
_MOST_DIMS = 64
# Bytes of tensors, over those of their file: a few may share a storage.
_MOST_SHARING = 4

_DTYPES: dict[str, np.dtype] = {
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
_STORAGES = {
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


@dataclasses.dataclass(frozen=True)
class _StorageKind:
    # None: a storage of bytes, whose tensors have each a dtype.
    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class _Storage:
    file: StoredZip
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
    _storage: _Storage = dataclasses.field(repr=False)
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
    def file_offset(self) -> int:
        """The byte of the file at which its first element is."""
        start = self._storage.file.entry(self._storage.entry).start
        return start + self._offset * self.dtype.itemsize

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """The bytes from an element to the next, by dim."""
        return tuple(stride * self.dtype.itemsize for stride in self._strides)


class TorchZip:
    """A file of `torch.save` that is open for reading; a context manager.

    Args:
      path: local, or in a bucket.
      names: beside those of PyTorch, see `closed_pickle.decode`.

    Attributes:
      value: the content: dicts, lists, tuples, texts, numbers, None and `Tensor`s.
      num_bytes: the size of the file.

    Raises:
      FormatError: if it is no such file, damaged, or made to exhaust memory.
    """

    def __init__(
        self, path: epath.PathLike, *, names: Mapping[str, Any] | None = None
    ) -> None:
        self._zip = StoredZip(path, writer="torch.save")
        self._names = {**_NAMES, **(names or {})}
        self.num_bytes = self._zip.num_bytes
        try:
            self._prefix = self._checked_prefix()
            self.value: Any = self._decoded()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> TorchZip:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def _checked_prefix(self) -> str:
        # The directory that all entries are in, named after the file.
        path, names = self._zip.path, self._zip.names()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{path} has no data.pkl; it is no file of torch.save")
        prefix = pickles[0].removesuffix("data.pkl")
        if prefix + "version" in names:
            version = self._zip.read(prefix + "version").strip()
            if not version.isdigit() or int(version[:9]) not in _VERSIONS:
                raise FormatError(
                    f"{path} has version {version[:20]!r}, and this program reads"
                    f" {_VERSIONS[0]} to {_VERSIONS[-1]}; save it with an older torch"
                )
        if prefix + "byteorder" in names:
            order = self._zip.read(prefix + "byteorder")
            if order != b"little":
                raise FormatError(
                    f"{path} has the byte order {order[:20]!r}; only little is read:"
                    " save it anew on a little-endian machine"
                )
        return prefix

    def _decoded(self) -> Any:
        size = self._zip.size(self._prefix + "data.pkl") or 0
        if size > MOST_PICKLE_BYTES:
            raise FormatError(
                f"{self._zip.path} has a pickle of {size} bytes; at most"
                f" {MOST_PICKLE_BYTES} are read"
            )
        return closed_pickle.decode(
            self._zip.read(self._prefix + "data.pkl"),
            file=self._zip.path,
            names=self._names,
            persistent=self._storage,
        )

    def _storage(self, persistent_id: Any) -> _Storage:
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            raise ValueError("it is no tuple of five")
        tag, kind, key, _, num_elements = persistent_id
        if tag != "storage" or not isinstance(kind, _StorageKind):
            raise ValueError("it names no storage")
        if not isinstance(key, str) or type(num_elements) is not int:
            raise ValueError("its key is no text or its size no number")
        entry = f"{self._prefix}data/{key}"
        size = self._zip.size(entry)
        if size is None:
            raise ValueError(f"the file has no entry data/{key[:40]}")
        width = 1 if kind.dtype is None else kind.dtype.itemsize
        if num_elements * width != size:
            raise ValueError(
                f"data/{key} has {size} bytes, and {num_elements} elements take"
                f" {num_elements * width}"
            )
        return _Storage(self._zip, entry, kind.dtype, size)


def read(path: epath.PathLike) -> Any:
    """The content of a file of `torch.save`, with arrays in place of tensors.

    Raises:
      FormatError: as `TorchZip`.
    """
    with TorchZip(path) as file:
        views = dict.fromkeys(tensor for _, tensor in tensors(file.value))
        num_bytes = sum(tensor.num_bytes for tensor in views)
        if num_bytes > _MOST_SHARING * file.num_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes of tensors in {file.num_bytes} bytes:"
                " they overlap; clone them before they are saved"
            )
        return _with_arrays(file.value, {view: view.read() for view in views})


def _with_arrays(value: Any, arrays: Mapping[Tensor, np.ndarray]) -> Any:
    if isinstance(value, Tensor):
        return arrays[value]
    if isinstance(value, dict):
        return {key: _with_arrays(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_arrays(each, arrays) for each in value)
    return value


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


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is no number from 0 up")
    return value


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: np.dtype | None
) -> Tensor:
    if not isinstance(storage, _Storage) or dtype is None:
        raise ValueError("it has no storage, or no type")
    if type(shape) is not tuple or type(strides) is not tuple:
        raise ValueError("its shape and strides are no tuples")
    if len(shape) != len(strides) or len(shape) > _MOST_DIMS:
        raise ValueError(f"it has {len(shape)} dims and {len(strides)} strides")
    for number in (*shape, *strides):
        _number(number, "a dim or stride")
    if storage.num_bytes % dtype.itemsize:
        raise ValueError(f"its storage is no multiple of {dtype.itemsize} bytes")
    held = storage.num_bytes // dtype.itemsize
    count = math.prod(shape)
    if math.prod(filter(None, shape)) > 1 << 48:
        raise ValueError(f"shape {shape} is too large")
    last = _number(offset, "its offset") + sum(
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


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    # The rest is about gradients.
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    return _tensor(storage, offset, shape, strides, dtype)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Tensor:
    if len(rest) < 3 or not isinstance(rest[2], np.dtype):
        raise ValueError("it has no type")
    return _tensor(storage, offset, shape, strides, rest[2])


def _parameter(value: Any, *_: Any) -> Any:
    if not isinstance(value, Tensor):
        raise ValueError("it is no tensor")
    return value


def _sizes(dims: Any = ()) -> tuple[int, ...]:
    if not isinstance(dims, tuple | list):
        raise ValueError("it is no sequence")
    return tuple(_number(dim, "a dim") for dim in dims)


def _mapping(pairs: Any = ()) -> dict[Any, Any]:
    if isinstance(pairs, dict):
        return dict(pairs)
    if not isinstance(pairs, list | tuple) or pairs:
        raise ValueError("only an empty one, or one of a dict, is read")
    return {}


def _latin_1(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are texts in latin1")
    return text.encode("latin1")


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise ValueError("it is no sequence")
    if not all(isinstance(item, str | int | float | None) for item in items):
        raise ValueError("only texts and numbers are read")
    return set(items)


def _device(kind: Any, number: Any = None) -> str:
    if not isinstance(kind, str):
        raise ValueError("it is no text")
    return kind if number is None else f"{kind}:{_number(number, 'its number')}"


_NAMES: dict[str, Any] = {
    **{
        f"{module} {name}": _StorageKind(_DTYPES[dtype])
        for name, dtype in _STORAGES.items()
        for module in ("torch", "torch.storage")
    },
    **{f"torch {name}": dtype for name, dtype in _DTYPES.items()},
    "torch.storage UntypedStorage": _StorageKind(None),
    "torch._utils _rebuild_tensor": Call("tensor", _tensor_v2),
    "torch._utils _rebuild_tensor_v2": Call("tensor", _tensor_v2),
    "torch._utils _rebuild_tensor_v3": Call("tensor", _tensor_v3),
    "torch._utils _rebuild_parameter": Call("parameter", _parameter),
    "torch Size": Call("size", _sizes),
    "torch device": Call("device", _device),
    "collections OrderedDict": Call("OrderedDict", _mapping),
    "collections Counter": Call("Counter", _mapping),
    "_codecs encode": Call("bytes", _latin_1),
    "__builtin__ set": Call("set", _set),
    "builtins set": Call("set", _set),
}
