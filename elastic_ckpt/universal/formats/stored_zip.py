"""The entries of zips whose content is as it is: where they lie, and their CRC-32.

Entries must be uncompressed, lie inside the zip and not overlap, so a small file cannot
stand for much memory. A zip may be a part of a larger file.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import zipfile
from collections.abc import Callable
from typing import IO, cast

from elastic_ckpt.universal.formats.format_error import FormatError

# Bytes `start` to `start + size` of a file; fewer if it ends before.
Read = Callable[[int, int], bytes]

# A directory of more bytes may take a quarter of those of its file.
_MOST_DIRECTORY_BYTES = 16 << 20
_LOCAL = struct.Struct("<4s22xHH")
_PROBLEMS = (
    *(zipfile.BadZipFile, struct.error, ValueError, OverflowError),
    *(NotImplementedError, UnicodeError, IndexError, KeyError, EOFError),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ZipEntry:
    """An entry of a zip.

    Attributes:
      start: the first byte of its content in the file.
      size: of its content.
      crc: its CRC-32.
    """

    start: int
    size: int
    crc: int


def entries(
    read: Read, *, begin: int, size: int, stored_bytes: int, place: str, writer: str
) -> dict[str, ZipEntry]:
    """The entries of a zip by name, in the order of its directory.

    Args:
      read: bytes of the file.
      begin: the first byte of the zip.
      size: of the zip.
      stored_bytes: of it, without holes of the file.
      place: the file, and the part of it, for messages.
      writer: the program that should have written it, for messages.

    Raises:
      FormatError: if it is no zip, is cut short, or has other entries than these.
    """
    most = min(stored_bytes, max(_MOST_DIRECTORY_BYTES, stored_bytes // 4))
    window = _Window(read, begin, size, most)
    try:
        # Nothing is decompressed: only the directory is read.
        archive = zipfile.ZipFile(cast(IO[bytes], window))
        infos, end = archive.infolist(), archive.start_dir
    except _PROBLEMS as error:
        raise FormatError(
            f"{place} is no file of {writer}, or is cut short ({error}); files from"
            " before PyTorch 1.6 are no zips: load them with torch and save them anew"
        ) from None
    held: dict[str, ZipEntry] = {}
    for info in infos:
        name = info.orig_filename
        is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if not is_plain or info.compress_size != info.file_size:
            raise FormatError(
                f"{place} has the entry {name[:200]}, which is compressed or encrypted;"
                f" {writer} writes neither: it was packed anew"
            )
        if name in held:
            raise FormatError(f"{place} has the entry {name[:200]} twice")
        is_before = 0 <= info.header_offset < end
        start = _content(read, begin, info) if is_before else None
        if start is None:
            raise FormatError(f"{place} has no entry where {name[:200]} should be")
        if start + info.file_size > begin + end:
            raise FormatError(
                f"{place} has the entry {name[:200]} of {info.file_size} bytes from"
                f" {start}, which is not inside the {end} bytes before its directory"
            )
        held[name] = ZipEntry(start, info.file_size, info.CRC)
    spans = sorted((each.start, each.start + each.size) for each in held.values())
    for (_, stop), (start, _) in itertools.pairwise(spans):
        if start < stop:
            raise FormatError(f"{place} has entries that overlap at byte {start}")
    return held


def _content(read: Read, begin: int, info: zipfile.ZipInfo) -> int | None:
    # The first byte of an entry's content, which a header of its name is before.
    at = begin + info.header_offset
    header = read(at, _LOCAL.size)
    if len(header) < _LOCAL.size:
        return None
    magic, name_bytes, extra_bytes = _LOCAL.unpack(header)
    is_utf8 = info.flag_bits & 0x800
    try:
        name = info.orig_filename.encode("utf-8" if is_utf8 else "cp437")
    except UnicodeEncodeError:
        return None
    if magic != b"PK\x03\x04" or name_bytes != len(name):
        return None
    if read(at + _LOCAL.size, name_bytes) != name:
        return None
    return at + _LOCAL.size + name_bytes + extra_bytes


class _Window:
    """A part of a file, as a file that `zipfile` reads."""

    def __init__(self, read: Read, begin: int, size: int, most: int) -> None:
        self._read = read
        self._begin = begin
        self._size = size
        self._most = most
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = (0, self._at, self._size)[whence] + offset
        if at < 0:
            raise ValueError("it has a place before its beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        if size > self._most:
            raise ValueError(f"its directory would have {size} bytes")
        size = left if size < 0 else min(size, left)
        content = self._read(self._begin + self._at, size)
        self._at += len(content)
        return content
