"""Reads `torch.save` files without torch and without running any code in them.

Such a file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are
views of storages, and `data/<key>`, the bytes of each storage. A tensor becomes a
`StoredTensor`, a record of where its values are.

Python's C unpickler decodes the pickle. Names in the pickle are never imported: a few
PyTorch names map to types in this module; all other names map to `Inert`, which only
stores its arguments and state. Nothing in the file is trusted: a tensor must lie inside
its storage and must not be larger than the storage, and everything that is decoded must
match its CRC-32, if the file has checksums. A malicious pickle can still exhaust memory
or crash the process.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, ClassVar, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import checkpoint, files
from elastic_ckpt.universal.formats.checkpoint import Checksum, Fragment, StoredTensor
from elastic_ckpt.universal.formats.files import FormatError

# Dtypes by PyTorch's names.
NAMES = {
    f"torch.{name}": np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "int64", "int32", "int16", "int8", "bool"),
        *("uint64", "uint32", "uint16", "uint8"),
    )
}
_STORAGES = {
    f"{module}.{kind}Storage": NAMES[f"torch.{name}"]
    for kind, name in {
        **{"Double": "float64", "Float": "float32", "Half": "float16"},
        **{"BFloat16": "bfloat16", "Bool": "bool", "Long": "int64", "Int": "int32"},
        **{"Short": "int16", "Char": "int8", "Byte": "uint8"},
        **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
    }.items()
    for module in ("torch", "torch.storage")
}

MOST_PICKLE_BYTES = 256 << 20
# Requests to a bucket are slow.
_THREADS = 8

# Reads the bytes `start` to `start + size` of a file, or fewer if the file ends early.
Read = Callable[[int, int], bytes]
_Value = TypeVar("_Value")

_END = struct.Struct("<4s6xHII2x")
_END64 = struct.Struct("<4s28xQQQ")
_LISTED = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")
# The last bytes of a zip, which contain the end records of its directory.
_TAIL_BYTES = 256


def _entries(read: Read, begin: int, size: int) -> dict[str, Checksum]:
    # Each entry's byte range in the file and CRC-32; raises ValueError or struct.error.
    #
    # Python's zipfile takes ten times as long, and a distributed checkpoint has a zip
    # for each part of a tensor.
    tail_start = begin + max(0, size - _TAIL_BYTES)
    tail = read(tail_start, begin + size - tail_start)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise ValueError("it is not a complete zip")
    _, count, num_bytes, start = _END.unpack_from(tail, at)
    if count == 0xFFFF or 0xFFFFFFFF in (num_bytes, start):
        at64 = max(0, tail.rfind(b"PK\6\6", 0, at))
        _, count, num_bytes, start = _END64.unpack_from(tail, at64)
    if start + num_bytes > size:
        raise ValueError("its zip directory lies outside the zip")
    directory, at = read(begin + start, num_bytes), 0
    held: dict[str, Checksum] = {}
    for _ in range(count):
        magic, flags, method, crc, packed, length, *sizes, header = _LISTED.unpack_from(
            directory, at
        )
        name_end = at + _LISTED.size + sizes[0]
        name = directory[at + _LISTED.size : name_end].decode()
        if 0xFFFFFFFF in (length, packed, header):
            extra = directory[name_end : name_end + sizes[1]]
            wide = iter(struct.unpack_from(f"<{(len(extra) - 4) // 8}Q", extra, 4))
            length, packed, header = (
                next(wide, size) if each == 0xFFFFFFFF else each
                for each in (length, packed, header)
            )
        if magic != b"PK\1\2" or method or flags & 1 or packed != length:
            raise ValueError(f"its entry {name[:200]!r} is compressed or encrypted")
        local = read(begin + header, _LOCAL.size) if header < start else b""
        local_magic, *lengths = _LOCAL.unpack(local)
        content = header + _LOCAL.size + sum(lengths)
        if local_magic != b"PK\3\4" or content + length > start or name in held:
            raise ValueError(f"its entry {name[:200]!r} is repeated or outside the zip")
        content += begin
        held[name] = Checksum(content, content + length, crc)
        at += _LISTED.size + sum(sizes)
    return held


class _Closed(type):
    # A pickle may set attributes on anything on its stack, even on types.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("sets an attribute of a class")


class Inert(metaclass=_Closed):
    """A pickle's record of an object whose class is not imported."""

    __slots__ = ("arguments", "items", "parts", "state")
    full_name: ClassVar[str] = ""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        """Stores the arguments."""
        made: Any = object.__new__(cls)
        made.arguments, made.state, made.parts, made.items = arguments, None, [], {}
        return made

    def __setstate__(self: Any, state: Any) -> None:
        """Stores the state."""
        self.state = state

    def extend(self: Any, parts: Any) -> None:
        """Adds elements; pickles of lists call it."""
        self.parts += parts

    def append(self: Any, part: Any) -> None:
        """Adds an element; pickles of lists call it."""
        self.parts.append(part)

    def __setitem__(self: Any, key: Any, value: Any) -> None:
        self.items[key] = value

    def content(self: Any) -> Any:
        """The object's elements, its attributes, or its single constructor argument."""
        if self.items or self.parts:
            return self.items or self.parts
        if self.state is not None:
            return self.state if isinstance(self.state, dict) else {"state": self.state}
        values = [each for each in self.arguments if not isinstance(each, type)]
        is_one = len(values) == 1 and isinstance(values[0], str | int | float | None)
        return values[0] if is_one else {}


class _Dict(dict[Any, Any], metaclass=_Closed):
    # A dict that drops attributes and a defaultdict's default argument.
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(each for each in arguments if isinstance(each, dict | list)))

    def __setstate__(self, state: Any) -> None:
        pass


class _View(NamedTuple):
    # A tensor as its pickle describes it, in the storage `key`; unchecked.
    dtype: Any
    key: Any
    offset: Any
    shape: Any
    strides: Any
    lazy: str


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> _View:
    # After two arguments about gradients come the type, if it differs from the
    # storage's, and the bits of lazy views.
    held, key = storage
    types: Iterator[Any] = (each for each in more if isinstance(each, type))
    dtype = next((NAMES.get(each.full_name, each) for each in types), held)
    bits = next((each for each in more[2:] if isinstance(each, dict)), {})
    lazy = " ".join(bit for bit in ("conj", "neg") if bits.get(bit))
    return _View(dtype, key, offset, shape, strides, lazy)


def _maker(function: Callable[..., Any]) -> type:
    # A class that the pickle calls instead of the function, which it cannot reach.
    fields = {"__slots__": (), "__new__": lambda _, *arguments: function(*arguments)}
    return _Closed("Maker", (), fields)


_PLAIN_TENSORS = (
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    "torch.nn.Parameter",
)
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view,
    "torch._utils._rebuild_parameter": lambda value, *_: value,
    "torch._utils._rebuild_parameter_with_state": lambda value, *_: value,
    # A tensor with attributes, which are dropped; tensors of subclasses become inert.
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, parts, *_: (
        make(*parts)
        if getattr(kind, "full_name", "") in _PLAIN_TENSORS
        else Inert(make, kind)
    ),
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    "_codecs.encode": lambda text, *_: text.encode("latin1"),
    "pathlib.PosixPath": lambda *parts: os.path.join("", *parts),
    "pathlib._local.PosixPath": lambda *parts: os.path.join("", *parts),
}
_TYPES: dict[str, type] = {
    **{name: _maker(function) for name, function in _MAKERS.items()},
    "torch.Size": tuple,
    **{f"collections.{n}": _Dict for n in ("OrderedDict", "Counter", "defaultdict")},
    **{
        f"{m}.{t.__name__}": t
        for m in ("builtins", "__builtin__")
        for t in (set, frozenset)
    },
}


@functools.lru_cache(maxsize=2**12)
def _inert(full_name: str) -> type:
    return _Closed("Inert", (Inert,), {"__slots__": (), "full_name": full_name})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _TYPES.get(f"{module}.{name}") or _inert(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        # After its first item, `pid` has the storage's type, key, device and size.
        return _STORAGES.get(pid[1].full_name, pid[1].full_name), pid[2]


# A run of common opcodes whose argument has a fixed size; indexes below 2**20 take
# little memory. Parsing each opcode in Python would take longer than decoding.
_SAFE = re.compile(
    rb"(?:[()NQRabestu}\x5d\x81\x85-\x89\x90\x93\x94]|[Khq].|M..|[Jj].{4}|G.{8}"
    rb"|r..[\0-\x0f]\0)*+",
    re.S,
)


def decoded(content: bytes, place: str) -> Any:
    """Decodes a pickle; objects become `Inert`. Errors name `place`.

    Raises:
      FormatError: if the pickle is malformed or truncated.
    """
    try:
        # Unpicklers allocate memory for every smaller index.
        for opcode, index, _ in pickletools.genops(stream := io.BytesIO(content)):
            if "PUT" in opcode.name and index not in range(len(content)):
                raise ValueError(f"{opcode.name} has index {index}")
            stream.seek(_SAFE.match(content, stream.tell()).end())  # pyrefly: ignore
        # The buffer reads ahead because a call for each opcode would be slow.
        return _Unpickler(io.BufferedReader(io.BytesIO(content), 1 << 17)).load()
    except Exception as error:
        raise FormatError(
            f"{place} has a pickle that is malformed or truncated ({error!r:.300})"
        ) from None


class Archive:
    """A `torch.save` zip: `size` bytes of a file, beginning at offset `begin`.

    Attributes:
      place: the file and the zip's position in it, used in error messages.
      entries: the entries by name.
      has_crc: whether the file was written with CRC-32 checksums.

    Raises:
      FormatError: if these bytes are not such a zip or are truncated.
    """

    def __init__(self, read: Read, begin: int, size: int, path: str) -> None:
        self._read = read
        self._path = path
        self.place = f"{path} (from byte {begin})" if begin else path
        try:
            self.entries = _entries(read, begin, size)
        except (ValueError, struct.error) as error:
            raise FormatError(
                f"{self.place} is not a torch.save file or is truncated ({error}); if"
                " the file is from before PyTorch 1.6, load it with torch and save it"
                " again"
            ) from None
        pickles = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{path} has no data.pkl; it is not a torch.save file")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self.has_crc = any(each.crc for each in self.entries.values())

    def content(self, entry: Checksum) -> bytes:
        """Reads an entry.

        Raises:
          FormatError: if the CRC-32 does not match.
        """
        start, stop, expected = entry
        content = self._read(start, stop - start)
        crc = zlib.crc32(content)
        if len(content) != stop - start or (self.has_crc and crc != expected):
            found = f"the CRC-32 {crc:08x}, not {expected:08x}"
            raise checkpoint.damaged(self._path, start, stop, found)
        return content

    def pickle(self) -> bytes:
        """Reads the pickle.

        Raises:
          FormatError: if the pickle is too large or damaged or the file is big-endian.
        """
        order = self.entries.get(f"{self._prefix}byteorder")
        if order is not None and self.content(order) != b"little":
            raise FormatError(
                f"{self.place} is not little-endian; save it again on a little-endian"
                " machine"
            )
        entry = self.entries[f"{self._prefix}data.pkl"]
        if entry.stop - entry.start > MOST_PICKLE_BYTES:
            raise FormatError(
                f"{self.place} has a pickle of {entry.stop - entry.start} bytes, but at"
                f" most {MOST_PICKLE_BYTES} are supported"
            )
        return self.content(entry)

    def value(
        self,
        of_tensor: Callable[[StoredTensor, Checksum], Any] = lambda tensor, _: tensor,
    ) -> Any:
        """Decodes the pickle to dicts, lists, numbers and strings.

        Objects become dicts of their attributes; enum members, their values; classes
        and functions, their names.

        Args:
          of_tensor: a function that takes a tensor and its storage entry and returns
            the tensor's replacement.

        Raises:
          FormatError: if the pickle is damaged or a tensor is invalid.
        """

        def plain(value: Any, keys: tuple[Any, ...] = ()) -> Any:
            kind = type(value)
            if kind is _View:
                return of_tensor(*self.tensor(value, "/".join(map(str, keys))))
            if isinstance(value, Inert):
                return plain(value.content(), keys)
            if kind is dict or kind is _Dict:
                return {
                    plain(key): plain(each, (*keys, key)) for key, each in value.items()
                }
            if kind in (list, tuple, set, frozenset):
                return kind(plain(each, (*keys, n)) for n, each in enumerate(value))
            name = getattr(value, "full_name", value)
            return NAMES.get(name, name) if isinstance(value, type) else value

        try:
            return plain(decoded(self.pickle(), self.place))
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{self.place} is malformed ({error!r:.200})") from None

    def tensor(self, view: Any, name: str) -> tuple[StoredTensor, Checksum]:
        """The unnamed tensor that `decoded` returned as `view`, and its storage entry.

        `name` is used in error messages.

        Raises:
          FormatError: if `view` is not a tensor, does not lie inside its storage, or is
            larger than the storage.
        """
        place = f"{self.place}: the tensor {name!r:.200}"
        if type(view) is not _View:
            raise FormatError(f"{place} is not a tensor that torch.save wrote")
        dtype, key, offset, shape, strides, lazy = view
        entry = self.entries.get(f"{self._prefix}data/{key}")
        if entry is None or not isinstance(dtype, np.dtype):
            raise FormatError(
                f"{place} has the type {dtype!s:.60} and the storage {key!s:.40}; the"
                f" {'storage is missing' if entry is None else 'type is unsupported'}"
            )
        if not (
            type(shape) is type(strides) is tuple
            and len(shape) == len(strides)
            and all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *strides))
        ):
            raise FormatError(
                f"{place} has an invalid offset or invalid strides: the offset and"
                " strides must be non-negative integers, with exactly one stride per"
                " dim"
            )
        checkpoint.checked_shape(shape, place)
        count, most = math.prod(shape), (entry.stop - entry.start) // dtype.itemsize
        last = offset + sum(
            (n - 1) * step for n, step in zip(shape, strides, strict=True)
        )
        if count and (count > most or last >= most):
            raise FormatError(
                f"{place} of shape {shape}, strides {strides} and offset {offset} does"
                f" not fit in its storage of {most} elements; if the tensor is"
                " expanded, clone it before saving it"
            )
        fragment = Fragment(
            box=checkpoint.whole(shape),
            file=self._path,
            offset=entry.start + offset * dtype.itemsize,
            strides=tuple(stride * dtype.itemsize for stride in strides),
        )
        return StoredTensor(
            name="",
            dtype=dtype,
            shape=shape,
            fragments=(fragment,) if count else (),
            view=lazy,
        ), entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile:
    """The structure of a file that has been read and closed.

    Its `value` consists of dicts, lists, numbers, strings, and unnamed tensors.
    """

    path: str
    value: Any

    def at(self, *keys: str) -> Any:
        """The value at nested `keys`; None if one of the keys is missing."""
        value = self.value
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def typed(self, kind: type[_Value], *keys: str) -> _Value:
        """The value at nested `keys`, which must be an instance of `kind`.

        Raises:
          FormatError: if the value is missing or has a different type.
        """
        value = self.at(*keys)
        if not isinstance(value, kind):
            raise self.error(
                f"has no {kind.__name__} {'/'.join(keys) or 'at its top level'}"
            )
        return value

    def error(self, what: str) -> FormatError:
        """An error about the file; `what` continues the sentence."""
        return FormatError(f"{self.path} {what}")


def read(path: epath.PathLike, *, span: tuple[int, int] | None = None) -> TorchFile:
    """Reads a file's structure, but not the values of its tensors.

    Args:
      path: the file, local or in a bucket.
      span: the zip's offset in the file and its size; None for the whole file.

    Raises:
      FormatError: if the file is not a `torch.save` file or is damaged.
    """
    with files.opened(path) as file:
        value = _archive(file, str(path), span).value()
    return TorchFile(path=str(path), value=value)


def _archive(file: Any, path: str, span: tuple[int, int] | None = None) -> Archive:
    def read_at(start: int, size: int) -> bytes:
        file.seek(start)
        return file.read(size)

    return Archive(read_at, *(span or (0, file.seek(0, 2))), path)


def read_all(paths: Mapping[Any, epath.Path]) -> dict[Any, TorchFile]:
    """Reads the structures of many files; the result has the keys of `paths`.

    Raises:
      FormatError: see `read`.
    """
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(paths, threads.map(read, paths.values()), strict=True))


def read_arrays(path: epath.PathLike) -> Any:
    """Reads a file, local or in a bucket, with arrays in place of tensors.

    Raises:
      FormatError: see `read`; also if a CRC-32 does not match.
    """
    with files.opened(path) as file:
        archive = _archive(file, str(path))
        # Views of the same storage are rarely far apart.
        content = functools.lru_cache(maxsize=4)(archive.content)

        @functools.cache
        def array(tensor: StoredTensor, entry: Checksum) -> np.ndarray:
            return _array(content(entry), entry.start, tensor)

        return archive.value(array)


def _array(content: bytes, start: int, tensor: StoredTensor) -> np.ndarray:
    if not tensor.fragments:
        return np.empty(tensor.shape, tensor.dtype)
    (place,) = tensor.fragments
    strided = np.ndarray(
        tensor.shape, tensor.dtype, content, place.offset - start, place.strides
    )
    array = strided.conj() if "conj" in tensor.view else strided
    return -array if "neg" in tensor.view else np.array(array, order="C")


def checksums(path: str) -> Sequence[Checksum]:
    """The CRC-32 of each of a file's entries; none if it was written without checksums.

    Raises:
      FormatError: if the file is not a `torch.save` file.
    """
    with files.opened(path) as file:
        archive = _archive(file, path)
    held = [each for each in archive.entries.values() if each.start < each.stop]
    return held if archive.has_crc else ()


def tensors(value: Any, between: str = ".", name: str = "") -> Iterator[StoredTensor]:
    """All tensors in a decoded value, each named by its keys joined with `between`."""
    if isinstance(value, StoredTensor):
        yield dataclasses.replace(value, name=name)
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from tensors(
                each, between, f"{name}{between}{key}" if name else str(key)
            )
