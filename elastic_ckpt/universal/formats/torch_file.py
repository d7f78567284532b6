"""Reads files of `torch.save` without torch, and without running anything in them.

Such a file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are
views of storages, and `data/<key>`, the bytes of each storage. A tensor becomes a
`Tensor`, a record of where its values lie.

Python's unpickler in C decodes the pickle. Names in it are never imported: a few of
PyTorch stand for types of this module, all others for `Inert`, which keeps what it is
given. Nothing in the file is trusted: a tensor must lie inside its storage and may not
be larger than it, and what is decoded must have its CRC-32, if the file was written
with any. A pickle that was made to do so can still use up memory, or end the process.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import coverage, opened, plain_values, source_files
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.stored import Checksum, Fragment

# By the names that PyTorch has for them.
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
# torch.save writes version 3; later numbers are TorchScript's.
_READ = {"byteorder": [b"little"], "version": [b"%d" % n for n in range(1, 11)]}
# Files of a bucket take long to answer.
_THREADS = 8

# Bytes `start` to `start + size` of a file; fewer if it ends before.
Read = Callable[[int, int], bytes]

_END = struct.Struct("<4s6xHII2x")
_END64 = struct.Struct("<4s28xQQQ")
_LISTED = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL_BYTES = 30
# The ends of the directory lie here.
_TAIL_BYTES = 256


class Entry(NamedTuple):
    """An entry of a zip: the first byte of its content in the file, size and CRC-32."""

    start: int
    size: int
    crc: int


def _entries(read: Read, begin: int, size: int) -> dict[str, Entry]:
    # Python's zipfile takes ten times as long, and a distributed checkpoint has a zip
    # for each part of a tensor. Raises ValueError or struct.error.
    tail_start = begin + max(0, size - _TAIL_BYTES)
    tail = read(tail_start, begin + size - tail_start)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise ValueError("it is no zip, or cut short")
    _, count, num_bytes, start = _END.unpack_from(tail, at)
    if count == 0xFFFF or 0xFFFFFFFF in (num_bytes, start):
        at64 = max(0, tail.rfind(b"PK\6\6", 0, at))
        _, count, num_bytes, start = _END64.unpack_from(tail, at64)
    if start + num_bytes > size:
        raise ValueError("its directory is not inside of it")
    directory = read(begin + start, num_bytes)
    held: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        magic, flags, method, crc, packed, length, *sizes, header = _LISTED.unpack_from(
            directory, at
        )
        at += _LISTED.size
        name_bytes, extra_bytes, comment_bytes = sizes
        encoded = directory[at : at + name_bytes]
        extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        if 0xFFFFFFFF in (length, packed, header):
            wide = iter(struct.unpack_from(f"<{(len(extra) - 4) // 8}Q", extra, 4))
            length, packed, header = (
                next(wide, size) if each == 0xFFFFFFFF else each
                for each in (length, packed, header)
            )
        name = encoded.decode()
        if magic != b"PK\1\2" or method or flags & 1 or packed != length:
            raise ValueError(f"its entry {name[:200]!r} is compressed or encrypted")
        if name in held:
            raise ValueError(f"it has the entry {name[:200]!r} twice")
        is_before = header < start
        local = read(begin + header, _LOCAL_BYTES + name_bytes) if is_before else b""
        if local[:4] != b"PK\3\4" or local[_LOCAL_BYTES:] != encoded:
            raise ValueError(f"it has no entry where {name[:200]!r} should be")
        # Behind the name are as many bytes as its header says.
        content = header + len(local) + int.from_bytes(local[28:30], "little")
        if content + length > start:
            raise ValueError(f"its entry {name[:200]!r} is not inside of it")
        held[name] = Entry(begin + content, length, crc)
    return held


class _Closed(type):
    # A pickle may set attributes of what is on its stack, such as types.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("sets an attribute of a class")


class Inert(metaclass=_Closed):
    """An object of another program: what its pickle has of it."""

    __slots__ = ("arguments", "parts", "state")
    full_name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    parts: Any
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        """Keeps the arguments."""
        made = object.__new__(cls)
        made.arguments, made.parts, made.state = arguments, None, None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keeps the state."""
        self.state = state

    def extend(self, parts: Any) -> None:
        """Adds parts of an object that is a list."""
        if not isinstance(self.parts, list):
            self.parts = []
        self.parts += parts

    def append(self, part: Any) -> None:
        """Adds a part of an object that is a list."""
        self.extend([part])

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts = self.parts if isinstance(self.parts, dict) else {}
        self.parts[key] = value

    def content(self) -> Any:
        """Its parts, its attributes, or the one value that it was made of."""
        state = self.state
        if self.parts is not None:
            return self.parts
        if type(state) is tuple and set(map(type, state)) <= {dict, type(None)}:
            # Of a class with slots.
            return {key: each for part in state for key, each in (part or {}).items()}
        if state is not None:
            return state if isinstance(state, dict) else {"state": state}
        values = [each for each in self.arguments if not isinstance(each, type)]
        is_one = len(values) == 1 and isinstance(values[0], str | int | float | None)
        return values[0] if is_one else {}


class _Dict(dict[Any, Any], metaclass=_Closed):
    # Its arguments are those of a dict, or the default of one; attributes are dropped.
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(each for each in arguments if isinstance(each, dict | list)))

    def __setstate__(self, state: Any) -> None:
        pass


class _Storage(NamedTuple):
    kind: str
    key: Any
    num_elements: Any


class _View(NamedTuple):
    # A tensor as its pickle has it; the type is "" if it is that of the storage.
    storage: Any
    offset: Any
    shape: Any
    strides: Any
    dtype: str
    lazy: str


def _view(*arguments: Any, dtype: str = "") -> _View:
    # Behind the strides are two arguments about gradients, and the bits of lazy views.
    storage, offset, shape, strides = arguments[:4]
    bits = arguments[6] if len(arguments) > 6 else None
    bits = bits if isinstance(bits, dict) else {}
    lazy = " ".join(bit for bit in ("conj", "neg") if bits.get(bit))
    return _View(storage, offset, shape, strides, dtype, lazy)


def _typed_view(*arguments: Any) -> _View:
    # The third version, which has a type before the bits.
    dtype = arguments[6].full_name
    return _view(*arguments[:6], *arguments[7:], dtype=dtype)


def _of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    # A tensor with attributes, which are dropped; of another class it is no tensor.
    is_plain = getattr(kind, "full_name", "") in _PLAIN_TENSORS
    return function(*arguments) if is_plain else Inert(function, kind)


def _maker(function: Callable[..., Any]) -> type:
    # Called in place of a function, which it hides from the pickle.
    fields = {"__slots__": (), "__new__": lambda _, *arguments: function(*arguments)}
    return _Closed("Maker", (), fields)


_PLAIN_TENSORS = (
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    "torch.nn.Parameter",
)
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _typed_view,
    "torch._utils._rebuild_parameter": lambda value, *_: value,
    "torch._utils._rebuild_parameter_with_state": lambda value, *_: value,
    "torch._tensor._rebuild_from_type_v2": _of_type,
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self._names: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        found = _TYPES.get(full_name) or self._names.get(full_name)
        if found is None:
            fields = {"__slots__": (), "full_name": full_name}
            found = self._names[full_name] = _Closed("Inert", (Inert,), fields)
        return found

    def persistent_load(self, pid: Any) -> Any:
        # Later versions add what describes a view.
        _, kind, key, _, num_elements = pid[:5]
        return _Storage(kind.full_name, key, num_elements)


def decoded(content: bytes, place: str) -> Any:
    """The value of a pickle, with `Inert` objects.

    Raises:
      FormatError: if it is malformed or cut short.
    """
    # A buffer reads ahead; calls for each opcode would be slow.
    reader = io.BufferedReader(io.BytesIO(content), 1 << 17)
    try:
        value = _Unpickler(reader).load()
        if reader.tell() != len(content):
            raise ValueError("it goes on after its end")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise FormatError(
            f"{place} has a pickle that is malformed or cut short ({text!r:.300})"
        ) from None
    return value


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
    entry: Entry
    file_offset: int
    byte_strides: tuple[int, ...]

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Its place: one fragment, or none if it is empty."""
        if 0 in self.shape:
            return ()
        return (
            Fragment(
                box=coverage.whole(self.shape),
                file=self.path,
                offset=self.file_offset,
                strides=self.byte_strides,
            ),
        )


class Archive:
    """A zip of `torch.save`, which is a file or a part of one.

    Args:
      read: bytes of the file.
      begin: the first byte of the zip.
      size: of the zip.
      path: of the file.

    Attributes:
      place: the file and the part of it, for messages.
      entries: by name.

    Raises:
      FormatError: if it is no such zip, or is cut short.
    """

    def __init__(self, read: Read, begin: int, size: int, path: str) -> None:
        self._read = read
        self._path = path
        self.place = f"{path} (from byte {begin})" if begin else path
        try:
            self.entries = _entries(read, begin, size)
        except (ValueError, struct.error) as error:
            raise FormatError(
                f"{self.place} is no file of torch.save, or is cut short ({error});"
                " files from before PyTorch 1.6 are no zips: load them with torch and"
                " save them anew"
            ) from None
        pickles = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{path} has no data.pkl; it is no file of torch.save")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._has_crc = any(each.crc for each in self.entries.values())

    def content(self, entry: Entry) -> bytes:
        """The content of an entry.

        Raises:
          FormatError: if it has another CRC-32.
        """
        content = self._read(entry.start, entry.size)
        crc, stop = zlib.crc32(content), entry.start + entry.size
        if len(content) != entry.size or (self._has_crc and crc != entry.crc):
            found = f"the CRC-32 {crc:08x}, not {entry.crc:08x}"
            raise opened.damaged(self._path, entry.start, stop, found)
        return content

    def pickle(self) -> bytes:
        """The pickle, of a version and a byte order that are read.

        Raises:
          FormatError: if they are others, or the pickle is too large or damaged.
        """
        for name, known in _READ.items():
            entry = self.entries.get(self._prefix + name)
            text = known[0] if entry is None else self.content(entry).strip()
            if text not in known:
                raise FormatError(
                    f"{self.place} has the {name} {text[:20]!r}, which is not read"
                    " here; save it anew, with an older torch or on another machine"
                )
        entry = self.entries[f"{self._prefix}data.pkl"]
        if entry.size > MOST_PICKLE_BYTES:
            raise FormatError(
                f"{self.place} has a pickle of {entry.size} bytes, and at most"
                f" {MOST_PICKLE_BYTES} are read"
            )
        return self.content(entry)

    def value(self, of_tensor: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
        """The value of the pickle: dicts, lists, numbers and texts.

        Objects become dicts of their attributes, members of enumerations their values,
        classes and functions their names.

        Args:
          of_tensor: what is put in place of a tensor.

        Raises:
          FormatError: if the pickle is damaged, or a tensor invalid.
        """

        def plain(value: Any, keys: tuple[Any, ...] = ()) -> Any:
            kind = type(value)
            if kind is _View:
                return of_tensor(self.tensor(value, "/".join(map(str, keys))))
            if isinstance(value, Inert):
                return plain(value.content(), keys)
            if kind is dict or kind is _Dict:
                return {
                    plain(key): plain(each, (*keys, key)) for key, each in value.items()
                }
            if kind is list or kind is tuple:
                return kind(plain(each, (*keys, n)) for n, each in enumerate(value))
            if kind is set or kind is frozenset:
                return set(map(plain, value))
            if isinstance(value, type):
                name = getattr(value, "full_name", value.__name__)
                return NAMES.get(name, name)
            return bytes(value) if kind is bytearray else value

        loaded = decoded(self.pickle(), self.place)
        try:
            return plain(loaded)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{self.place} is malformed ({error!r:.200})") from None

    def tensor(self, view: Any, name: str) -> Tensor:
        """The tensor that a value of the pickle is.

        Args:
          view: as `decoded` returned it.
          name: of the tensor, for messages.

        Raises:
          FormatError: if it is no tensor, does not lie inside its storage, or is larger
            than it.
        """
        place = f"{self.place}: the tensor {name!r:.200}"
        if type(view) is not _View or type(view.storage) is not _Storage:
            raise FormatError(f"{place} is no tensor of torch.save")
        storage, offset, shape, strides, dtype_name, lazy = view
        entry = self.entries.get(f"{self._prefix}data/{storage.key}")
        if entry is None:
            raise FormatError(f"{place} has no entry data/{storage.key!s:.40}")
        held = _STORAGES.get(storage.kind)
        dtype = NAMES.get(dtype_name) if dtype_name else held
        if dtype is None:
            kind = dtype_name or storage.kind
            raise FormatError(f"{place} has the type {kind:.60}, which is not read")
        # Storages without a type count bytes.
        num_bytes = storage.num_elements * (held.itemsize if held else 1)
        if num_bytes != entry.size or type(num_bytes) is not int:
            raise FormatError(
                f"{place}: data/{storage.key} has {entry.size} bytes, and"
                f" {storage.num_elements!r:.40} elements take {num_bytes!r:.40}"
            )
        if not (
            type(shape) is type(strides) is tuple
            and len(shape) == len(strides)
            and all(type(n) is int and 0 <= n < 1 << 63 for n in (offset, *strides))
        ):
            raise FormatError(
                f"{place} has an offset or strides that are no numbers from 0 up, or"
                " not one stride for each dim"
            )
        coverage.checked_shape(shape, place)
        count, most = math.prod(shape), entry.size // dtype.itemsize
        steps = zip(shape, strides, strict=True)
        last = offset + sum((dim - 1) * stride for dim, stride in steps)
        if count and (count > most or last >= most):
            raise FormatError(
                f"{place} of shape {shape}, strides {strides} and offset {offset} is"
                f" not inside {most} elements; a tensor that was expanded has to be"
                " cloned before it is saved"
            )
        return Tensor(
            dtype=dtype,
            shape=shape,
            view=lazy,
            path=self._path,
            entry=entry,
            file_offset=entry.start + (offset * dtype.itemsize if count else 0),
            byte_strides=tuple(stride * dtype.itemsize for stride in strides),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile:
    """A file that was read and closed.

    Attributes:
      path: its path or URL.
      value: dicts, lists, numbers and texts, and `Tensor`s.
    """

    path: str
    value: Any

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
        return self._of_type(dict, keys)

    def list_at(self, *keys: str) -> list[Any]:
        """The list under nested dicts.

        Raises:
          FormatError: if there is none.
        """
        return self._of_type(list, keys)

    def _of_type(self, kind: type, keys: tuple[str, ...]) -> Any:
        value = self.at(*keys)
        if not isinstance(value, kind):
            raise self.error(f"has no {kind.__name__} {'/'.join(keys) or 'at its top'}")
        return value

    def error(self, what: str) -> FormatError:
        """An error that names the file; `what` continues its sentence."""
        return FormatError(f"{self.path} {what}")

    def values(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Its numbers and texts by path, see `plain_values.flatten`."""
        return plain_values.flatten(self.value, without=without)


def read(path: epath.PathLike, *, span: tuple[int, int] | None = None) -> TorchFile:
    """The structure of a file.

    Args:
      path: local, or in a bucket.
      span: the first byte of the zip and its size; None if it is the whole file.

    Raises:
      FormatError: if it is no such file, or damaged.
    """
    with source_files.opened(path) as file:
        value = _archive(file, str(path), span).value()
    return TorchFile(path=str(path), value=value)


def _archive(file: Any, path: str, span: tuple[int, int] | None = None) -> Archive:
    def read_at(start: int, size: int) -> bytes:
        file.seek(start)
        return file.read(size)

    return Archive(read_at, *(span or (0, file.seek(0, 2))), path)


def read_all(paths: Mapping[Any, epath.Path]) -> dict[Any, TorchFile]:
    """The structures of files, by the keys of `paths`; see `read`.

    Raises:
      FormatError: as `read`.
    """
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(paths, threads.map(read, paths.values()), strict=True))


def read_arrays(path: epath.PathLike) -> Any:
    """The content of a file, with arrays in place of tensors.

    Args:
      path: local, or in a bucket.

    Raises:
      FormatError: as `read`, or if a part of the file has another CRC-32.
    """
    with source_files.opened(path) as file:
        archive = _archive(file, str(path))
        # Views of a storage are seldom far from one another.
        content = functools.lru_cache(maxsize=4)(archive.content)
        return archive.value(
            functools.cache(lambda tensor: _array(content(tensor.entry), tensor))
        )


def _array(content: bytes, tensor: Tensor) -> np.ndarray:
    if 0 in tensor.shape:
        return np.empty(tensor.shape, tensor.dtype)
    offset = tensor.file_offset - tensor.entry.start
    strided = np.ndarray(
        tensor.shape, tensor.dtype, content, offset, tensor.byte_strides
    )
    array = np.array(strided, order="C")
    array = array.conj() if "conj" in tensor.view else array
    return -array if "neg" in tensor.view else array


def checksums(path: str) -> Sequence[Checksum]:
    """The CRC-32 of everything in a file; none if it was written without.

    Raises:
      FormatError: if it is no file of torch.save.
    """
    with source_files.opened(path) as file:
        return listed_checksums(_archive(file, path).entries.values())


def listed_checksums(entries: Iterable[Entry]) -> Sequence[Checksum]:
    """The checksums of entries; none if all were written without."""
    held = [each for each in entries if each.size]
    if not any(each.crc for each in held):
        return ()
    return [Checksum(each.start, each.start + each.size, each.crc) for each in held]


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
