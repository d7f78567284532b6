"""Zips whose entries are uncompressed, read at their offsets, with their CRC-32.

Entries must lie inside the file and may not overlap, so a small file cannot stand for
much memory.
"""

from __future__ import annotations

import binascii
import dataclasses
import itertools
import struct
import zipfile
from collections.abc import Mapping
from typing import IO

from etils import epath

from elastic_ckpt.universal.formats.format_error import FormatError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class _Entry:
    start: int
    size: int
    crc: int


class StoredZip:
    """A zip that is open for reading.

    Args:
      path: local, or in a bucket.
      writer: the program that should have written it, for messages.

    Attributes:
      path: as a text.
      num_bytes: the size of the file.

    Raises:
      FormatError: if it is no zip, is cut short, or has other entries than these.
    """

    def __init__(self, path: epath.PathLike, *, writer: str) -> None:
        self.path = str(path)
        self._file: IO[bytes] = epath.Path(path).open("rb")
        self._verified: set[str] = set()
        try:
            self.num_bytes = self._file.seek(0, 2)
            self._entries = _entries(self._file, self.path, self.num_bytes, writer)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def names(self) -> list[str]:
        """The names of the entries, in the file's order."""
        return list(self._entries)

    def size(self, name: str) -> int | None:
        """The bytes of an entry; None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of an entry, all of which must have its CRC-32.

        Raises:
          FormatError: if there is no such entry, it is damaged, or the file was closed.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise FormatError(f"{self.path} has no entry {name}; it is no whole file")
        if self._file.closed:
            raise FormatError(f"{self.path} is closed; read its tensors before")
        if name not in self._verified:
            crc = 0
            for at in range(0, entry.size, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, entry.size - at)
                crc = binascii.crc32(self._read(entry.start + at, size), crc)
            if crc != entry.crc:
                raise FormatError(
                    f"{self.path} is damaged: {name} has the CRC-32 {crc:08x}, not"
                    f" {entry.crc:08x}; copy it again from where it was written"
                )
            self._verified.add(name)
        stop = entry.size if stop is None else stop
        return self._read(entry.start + start, stop - start)

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        content = self._file.read(size)
        if len(content) != size:
            raise FormatError(f"{self.path} was cut short while it was read")
        return content


def _entries(
    file: IO[bytes], path: str, num_bytes: int, writer: str
) -> dict[str, _Entry]:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (
        *(zipfile.BadZipFile, NotImplementedError, EOFError),
        *(OSError, ValueError, OverflowError, struct.error),
    ) as error:
        raise FormatError(
            f"{path} is no file of {writer}, or is cut short ({error}); files from"
            " before PyTorch 1.6 are no zips: load them with torch and save them anew"
        ) from None
    entries: dict[str, _Entry] = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise FormatError(
                f"{path} has the entry {info.filename}, which is compressed or"
                f" encrypted; {writer} writes neither: it was packed anew"
            )
        if info.filename in entries:
            raise FormatError(f"{path} has the entry {info.filename} twice")
        start = _start(file, info, path)
        if info.compress_size != info.file_size or start + info.file_size > num_bytes:
            raise FormatError(
                f"{path} has the entry {info.filename} of {info.file_size} bytes from"
                f" {start}, which is not inside the {num_bytes} bytes of the file"
            )
        entries[info.filename] = _Entry(start, info.file_size, info.CRC)
    _check_apart(entries, path)
    return entries


def _start(file: IO[bytes], info: zipfile.ZipInfo, path: str) -> int:
    # The first byte of an entry's content, which its local header is before.
    try:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER.size)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    except (OSError, ValueError, OverflowError, struct.error):
        magic, name_bytes, extra_bytes = b"", 0, 0
    if magic != _LOCAL_MAGIC:
        raise FormatError(f"{path} has no entry where {info.filename} shall be")
    return info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes


def _check_apart(entries: Mapping[str, _Entry], path: str) -> None:
    spans = sorted((each.start, each.start + each.size) for each in entries.values())
    for (_, stop), (start, _) in itertools.pairwise(spans):
        if start < stop:
            raise FormatError(f"{path} has entries that overlap at byte {start}")
