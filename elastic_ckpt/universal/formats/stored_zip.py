"""Zips whose entries are uncompressed, read at their offsets, with their CRC-32.

Entries must lie inside the file and may not overlap, so a small file cannot stand for
much memory.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import IO

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.universal.formats import source_file
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.zip_directory import Entry, Zip

# Those of a file of this machine stay in the cache of the processor.
_CHUNK_BYTES = 16 << 20
_LOCAL_CHUNK_BYTES = 1 << 20


class StoredZip:
    """A zip that is open for reading.

    Args:
      path: local, or in a bucket.
      writer: the program that should have written it, for messages.
      span: the first byte of the zip and its size; None if it is the whole file.

    Attributes:
      path: as a text.
      num_bytes: the size of the file.
      stored_bytes: of the zip, without holes of the file.

    Raises:
      FormatError: if it is no zip, is cut short, or has other entries than these.
    """

    def __init__(
        self,
        path: epath.PathLike,
        *,
        writer: str,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.path = str(path)
        self._file: IO[bytes] = source_file.opened(path)
        self._verified: set[str] = set()
        try:
            self.num_bytes = self._file.seek(0, 2)
            begin, size = span or (0, self.num_bytes)
            self.stored_bytes = min(
                size, source_file.num_stored_bytes(path, self.num_bytes)
            )
            place = Zip(begin=begin, size=size, file=self.path, writer=writer)
            self._entries = place.entries(self._read_headers)
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

    def entry(self, name: str) -> Entry:
        """The place of an entry, which the zip must have."""
        return self._entries[name]

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
            is_local = storage.is_local(self.path)
            check_crc(
                self._read,
                entry,
                f"{self.path} is damaged: {name}",
                chunk_bytes=_LOCAL_CHUNK_BYTES if is_local else _CHUNK_BYTES,
            )
            self._verified.add(name)
        stop = entry.size if stop is None else stop
        return self._read(entry.start + start, stop - start)

    def _read(self, start: int, size: int) -> bytes:
        content = self._read_some(start, size)
        if len(content) != size:
            raise FormatError(f"{self.path} was cut short while it was read")
        return content

    def _read_headers(self, start: int, size: int) -> bytes:
        if size > self.stored_bytes:
            raise FormatError(f"{self.path} has a directory in a hole of the file")
        return self._read_some(start, size)

    def _read_some(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def check_crc(
    read: Callable[[int, int], bytes],
    entry: Entry,
    problem: str,
    *,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Reads an entry piece by piece, and compares its CRC-32.

    Args:
      read: bytes of the file, from an offset, as many as a number.
      entry: of the zip.
      problem: the beginning of a message, which names the file and the entry.
      chunk_bytes: of a piece.

    Raises:
      FormatError: if it differs.
    """
    crc = 0
    for at in range(0, entry.size, chunk_bytes):
        size = min(chunk_bytes, entry.size - at)
        crc = binascii.crc32(read(entry.start + at, size), crc)
    if crc != entry.crc:
        raise FormatError(
            f"{problem} has the CRC-32 {crc:08x}, not {entry.crc:08x}; copy it again"
            " from the place that it was written to"
        )
