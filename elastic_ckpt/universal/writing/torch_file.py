"""Writes files that `torch.load` reads, also with `weights_only=True`, without torch.

A file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are views
of storages, and `data/<number>`, the bytes of each. Storages begin at multiples of 64,
as torch aligns them, so that they can be mapped. Equal values make equal files.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any, cast

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.torch_file import DTYPES, STORAGES
from elastic_ckpt.universal.strides import row_major
from elastic_ckpt.universal.writing import files
from elastic_ckpt.universal.writing.files import Write

_ALIGNMENT_BYTES = 64
_ROOT = "archive"
# The oldest time of a zip, as torch writes.
_TIME = (1980, 1, 1, 0, 0, 0)
# An extra field of a header: its kind, and the bytes after it.
_PADDING = struct.Struct("<2sH")
_LOCAL_HEADER_BYTES = 30
# The extra field with sizes of 64 bits, which is always written.
_WIDE_BYTES = 20
_MOST_NESTED = 64
_PROTOCOL = 2
# Shorter parts of a file are written together.
_LEAST_PART_BYTES = 2**16


def writes(value: Any) -> list[Write]:
    """The content of a file.

    Args:
      value: dicts, lists, tuples, texts, numbers, None and arrays of NumPy, which
        become tensors; they are not copied.

    Raises:
      CheckpointError: if a part of the value is something else.
      FormatError: if PyTorch has no storage of the dtype of an array.
    """
    pickler = _Pickler()
    entries: list[tuple[str, bytes | memoryview]] = [
        ("data.pkl", pickler.pickled(value)),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT_BYTES).encode()),
        ("byteorder", b"little"),
    ]
    for number, array in enumerate(pickler.arrays):
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        entries.append((f"data/{number}", content))
    entries.append(("version", b"3\n"))
    parts = _SparseFile()
    with zipfile.ZipFile(cast(IO[bytes], parts), "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=_TIME)
            info.extra = _padding(parts.tell(), len(info.filename))
            with archive.open(info, "w", force_zip64=True) as entry:
                entry.write(content)
    return list(parts.joined())


def content(value: Any) -> bytes:
    """The whole content of a file of few bytes; see `writes`."""
    return b"".join(each.values.tobytes() for each in writes(value))


class _SparseFile:
    """A file that holds what is written by reference; a part is replaced as a whole."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes | memoryview] = {}
        self._at = 0

    def write(self, content: bytes | memoryview) -> int:
        self._parts[self._at] = content
        self._at += len(content)
        return len(content)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        assert not whence
        self._at = offset
        return offset

    def flush(self) -> None:
        pass

    def joined(self) -> Iterator[Write]:
        """Long parts, and all short ones between two of them."""
        start, short = 0, b""
        for offset, part in sorted(self._parts.items()):
            if len(part) < _LEAST_PART_BYTES:
                short += part
                continue
            yield files.of_bytes(short, start)
            yield files.of_bytes(part, offset)
            start, short = offset + len(part), b""
        yield files.of_bytes(short, start)


def _padding(offset: int, name_bytes: int) -> bytes:
    # Fills the header of an entry, so that its content begins at a multiple.
    fixed = _LOCAL_HEADER_BYTES + name_bytes + _WIDE_BYTES + _PADDING.size
    length = -(offset + fixed) % _ALIGNMENT_BYTES
    return _PADDING.pack(b"FB", length) + b"Z" * length


class _Pickler:
    """Pickles plain values by protocol 2, and tensors as `torch.save` does."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._storages = {DTYPES[dtype]: name for name, dtype in STORAGES.items()}

    def pickled(self, value: Any) -> bytes:
        return (
            pickle.PROTO + bytes([_PROTOCOL]) + b"".join(self._value(value, 0)) + b"."
        )

    def _value(self, value: Any, depth: int) -> Iterator[bytes]:
        if depth > _MOST_NESTED:
            raise errors.CheckpointError("the value nests too deeply to be written")
        if value is None or isinstance(value, bool | int | float | str):
            # Without the version before it, and the end.
            yield pickle.dumps(value, _PROTOCOL)[2:-1]
        elif isinstance(value, dict):
            yield b"}("
            for key, each in value.items():
                yield from self._value(key, depth + 1)
                yield from self._value(each, depth + 1)
            yield b"u"
        elif isinstance(value, list | tuple):
            yield b"](" if isinstance(value, list) else b"("
            for each in value:
                yield from self._value(each, depth + 1)
            yield b"e" if isinstance(value, list) else b"t"
        elif isinstance(value, np.ndarray):
            yield from self._tensor(value)
        else:
            raise errors.CheckpointError(
                f"a {type(value).__name__} cannot be written to a file of PyTorch; give"
                " dicts, lists, texts, numbers and arrays"
            )

    def _tensor(self, array: np.ndarray) -> Iterator[bytes]:
        kind = self._storages.get(array.dtype)
        if kind is None:
            raise FormatError(
                f"PyTorch has no storage of {array.dtype}; cast it with `dtype`"
            )
        number = len(self.arrays)
        self.arrays.append(array)
        yield b"ctorch._utils\n_rebuild_tensor_v2\n(("
        yield from self._value("storage", 0)
        yield b"ctorch\n" + kind.encode() + b"\n"
        for part in (str(number), "cpu", array.size):
            yield from self._value(part, 0)
        # The storage, then the offset of the tensor in it.
        yield b"tQ"
        for part in (0, array.shape, row_major(array.shape, 1)):
            yield from self._value(part, 0)
        # Without a gradient and hooks.
        yield b"\x89ccollections\nOrderedDict\n)RtR"
