"""Writes files that `torch.load` reads, also with `weights_only=True`, without torch.

A file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are views
of storages, and `data/<number>`, the bytes of each. Storages begin at multiples of 64,
as torch aligns them, so that they can be mapped. Equal values make equal files.

Files are written past the page cache, and read back. Memory: that of the values, and a
few MiB for each thread that writes.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any, cast

import numpy as np
from etils import epath

from elastic_ckpt.core import digest, errors, host_memory, staged_file
from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.torch_file import DTYPES
from elastic_ckpt.universal.strides import row_major
from elastic_ckpt.universal.writing import direct_io

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
# The most that one system call writes.
_CALL_BYTES = 2**22
# Shorter parts of a file are written together.
_LEAST_PART_BYTES = 2**16
_MEMORY = host_memory.Pool()


def write(path: epath.PathLike, value: Any) -> None:
    """Writes a file; it appears whole, compared with the value, and durably.

    Args:
      path: local, or in a bucket; an existing file is replaced.
      value: dicts, lists, tuples, texts, numbers, None and arrays of NumPy, which
        become tensors.

    Raises:
      CheckpointError: if a part of the value is something else, or the file reads back
        other bytes.
      FormatError: if PyTorch has no storage of the dtype of an array.
      OSError: if storage fails, or another of `bucket_clients.failures`.
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
    parts = _Parts()
    with zipfile.ZipFile(cast(IO[bytes], parts), "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=_TIME)
            info.extra = _padding(parts.tell(), len(info.filename))
            with archive.open(info, "w", force_zip64=True) as entry:
                entry.write(content)
    memory = _MEMORY.take(_CALL_BYTES)
    try:
        with staged_file.staged_path(path) as temporary:
            for offset, part in parts.joined():
                direct_io.put(temporary, offset, part, memory)
            _compare(temporary, parts, direct_io.Reader(memory))
    finally:
        _MEMORY.give_back(memory)


class _Parts:
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

    def joined(self) -> Iterator[tuple[int, np.ndarray]]:
        """Long parts, and all short ones between two of them; uint8, with offsets."""
        start, short = 0, bytearray()
        for offset, part in sorted(self._parts.items()):
            if len(part) < _LEAST_PART_BYTES:
                short += part
                continue
            yield start, np.frombuffer(short, np.uint8)
            yield offset, np.frombuffer(part, np.uint8)
            start, short = offset + len(part), bytearray()
        yield start, np.frombuffer(short, np.uint8)


def _compare(path: str, parts: _Parts, reader: direct_io.Reader) -> None:
    for offset, part in parts.joined():
        for at in range(0, part.nbytes, _CALL_BYTES // 2):
            expected = part[at : at + _CALL_BYTES // 2]
            read = reader.read(path, offset + at, expected.nbytes)
            if digest.values_digest(read) != digest.values_digest(expected):
                raise errors.CheckpointError(
                    f"{path}: the bytes from {offset + at} read back other than they"
                    " were written; have the disk of this machine checked, and write"
                    " it again"
                )


def _padding(offset: int, name_bytes: int) -> bytes:
    # Fills the header of an entry, so that its content begins at a multiple.
    fixed = _LOCAL_HEADER_BYTES + name_bytes + _WIDE_BYTES + _PADDING.size
    length = -(offset + fixed) % _ALIGNMENT_BYTES
    return _PADDING.pack(b"FB", length) + b"Z" * length


class _Pickler:
    """Pickles plain values by protocol 2, and tensors as `torch.save` does."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._storages = {
            DTYPES[dtype]: name for name, dtype in torch_file.STORAGES.items()
        }

    def pickled(self, value: Any) -> bytes:
        return b"\x80\x02" + b"".join(self._value(value, 0)) + b"."

    def _value(self, value: Any, depth: int) -> Iterator[bytes]:
        if depth > _MOST_NESTED:
            raise errors.CheckpointError("the value nests too deeply to be written")
        if value is None:
            yield b"N"
        elif isinstance(value, bool):
            yield b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            yield _integer(value)
        elif isinstance(value, float):
            yield b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            content = value.encode()
            yield b"X" + struct.pack("<I", len(content)) + content
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
        yield b"tQ" + _integer(0)
        yield from self._value(array.shape, 0)
        yield from self._value(row_major(array.shape, 1), 0)
        # Without a gradient and hooks.
        yield b"\x89ccollections\nOrderedDict\n)RtR"


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(content) > 255:
        raise errors.CheckpointError(f"an integer has {len(content)} bytes, over 255")
    return b"\x8a" + bytes([len(content)]) + content
