"""Finds the uncompressed entries of a zip, which may be a part of a larger file.

Nothing that the zip claims is trusted: entries are uncompressed, lie between the
beginning and the directory, do not overlap, and each has a header of the same name.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping

from elastic_ckpt.universal.formats.format_error import FormatError

# Bytes `start` to `start + size` of a file; fewer if it ends before.
Read = Callable[[int, int], bytes]

MOST_ENTRIES = 500_000
_MOST_DIRECTORY_BYTES = 128 << 20
_END = struct.Struct("<4s4xHHIIH")
_END_64 = struct.Struct("<4s20xQQQQ")
_LOCATOR_64 = struct.Struct("<4s4xQ4x")
_CENTRAL = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")
_FULL_32 = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a zip.

    Attributes:
      start: the first byte of its content in the file.
      size: of its content.
      crc: its CRC-32.
    """

    start: int
    size: int
    crc: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zip:
    """The place of a zip.

    Attributes:
      begin: its first byte in the file.
      size: in bytes.
      file: for messages.
      writer: the program that should have written it, for messages.
    """

    begin: int
    size: int
    file: str
    writer: str

    def entries(self, read: Read) -> dict[str, Entry]:
        """The entries by name, in the order of the directory.

        Raises:
          FormatError: if it is no zip, is cut short, or has other entries than these.
        """
        try:
            count, at, num_bytes = self._directory(read)
            content = read(self.begin + at, num_bytes)
            if len(content) != num_bytes:
                raise ValueError("its directory is cut short")
            listed = list(_central(content, count))
        except (struct.error, ValueError, OverflowError) as error:
            raise FormatError(
                f"{self} is no file of {self.writer}, or is cut short ({error}); files"
                " from before PyTorch 1.6 are no zips: load them with torch and save"
                " them anew"
            ) from None
        entries: dict[str, Entry] = {}
        for name, header, size, crc, is_plain in listed:
            text = name.decode("utf-8", "backslashreplace")
            if not is_plain:
                raise FormatError(
                    f"{self} has the entry {text}, which is compressed or encrypted;"
                    f" {self.writer} writes neither: it was packed anew"
                )
            if text in entries:
                raise FormatError(f"{self} has the entry {text} twice")
            start = self._content(read, header, name)
            if start + size > self.begin + at:
                raise FormatError(
                    f"{self} has the entry {text} of {size} bytes from {start},"
                    f" which is not inside the {at} bytes before its directory"
                )
            entries[text] = Entry(start, size, crc)
        self._check_apart(entries)
        return entries

    def __str__(self) -> str:
        return f"{self.file} (from byte {self.begin})" if self.begin else self.file

    def _directory(self, read: Read) -> tuple[int, int, int]:
        # The number of entries; the first byte of the directory in the zip; its size.
        end = self.size - _END.size
        if end < 0:
            raise ValueError(f"it has {self.size} bytes")
        content = read(self.begin + end, _END.size)
        magic, _, count, size, at, comment = _END.unpack(content)
        if magic != b"PK\x05\x06" or comment:
            raise ValueError("it does not end as a zip")
        # torch.save writes the record for large zips into small ones, too.
        before = max(0, end - _LOCATOR_64.size)
        locator = read(self.begin + before, end - before)
        if locator[:4] == b"PK\x06\x07":
            _, end = _LOCATOR_64.unpack(locator)
            if end > self.size:
                raise ValueError("its directory is outside of it")
            large = read(self.begin + end, _END_64.size)
            magic, _, count, size, at = _END_64.unpack(large)
            if magic != b"PK\x06\x06":
                raise ValueError("it has no directory")
        if at + size != end:
            raise ValueError(f"its directory would end at byte {at + size}, not {end}")
        if size > _MOST_DIRECTORY_BYTES:
            raise ValueError(f"its directory would have {size} bytes")
        if count > min(MOST_ENTRIES, size // _CENTRAL.size):
            raise ValueError(f"it would have {count} entries")
        return count, at, size

    def _content(self, read: Read, offset: int, name: bytes) -> int:
        # The first byte of an entry's content, which a header is before.
        size = _LOCAL.size + len(name)
        header = read(self.begin + offset, size) if offset < self.size else b""
        if len(header) == size:
            magic, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
            is_name = name_bytes == len(name) and header[_LOCAL.size :] == name
            if magic == b"PK\x03\x04" and is_name:
                return self.begin + offset + size + extra_bytes
        text = name.decode("utf-8", "backslashreplace")
        raise FormatError(f"{self} has no entry where {text} should be")

    def _check_apart(self, entries: Mapping[str, Entry]) -> None:
        spans = sorted(
            (each.start, each.start + each.size) for each in entries.values()
        )
        for (_, stop), (start, _) in itertools.pairwise(spans):
            if start < stop:
                raise FormatError(f"{self} has entries that overlap at byte {start}")


def _central(content: bytes, count: int) -> Iterator[tuple[bytes, int, int, int, bool]]:
    # Name, first byte of the header, size, CRC-32, whether the content is as it was.
    at = 0
    for _ in range(count):
        (
            magic,
            flags,
            method,
            crc,
            packed,
            size,
            name_bytes,
            extra_bytes,
            note,
            start,
        ) = _CENTRAL.unpack_from(content, at)
        if magic != b"PK\x01\x02":
            raise ValueError("an entry of its directory is malformed")
        at += _CENTRAL.size
        name = content[at : at + name_bytes]
        at += name_bytes
        if _FULL_32 in (packed, size, start):
            extra = content[at : at + extra_bytes]
            size, packed, start = _wide(extra, [size, packed, start])
        at += extra_bytes + note
        yield name, start, size, crc, not method and not flags & 1 and packed == size
    if at != len(content):
        raise ValueError("its directory has more entries than it counts")


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    # Numbers that take more than 32 bits are in the extra field 1, in this order.
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            return [next(values) if n == _FULL_32 else n for n in numbers]
        at += 4 + size
    return numbers
