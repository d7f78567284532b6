"""Compares the checksums of what is read, while it is read.

A CRC-32 is that of a whole entry of a file, and a host needs some of its bytes. The CRC
of a range follows from those of its parts: so the CRCs of the bytes that are read
anyway are computed as they are read, and only the other bytes of their entries are read
in addition.

Algorithm: `crc32_combine` of zlib, a product of polynomials modulo that of CRC-32.
"""

from __future__ import annotations

import bisect
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from elastic_ckpt.universal.formats import checkpoint, files
from elastic_ckpt.universal.formats.checkpoint import Checksum

_PIECE_BYTES = 1 << 24
_POLYNOMIAL = 0xEDB88320


class Checks:
    """The checksums of the files of a checkpoint; any thread may call `note`.

    Args:
      checksums: finds those of a file; see `stored.Checkpoint`.
    """

    def __init__(self, checksums: Callable[[str], Sequence[Checksum]]) -> None:
        self._listed = functools.cache(lambda file: sorted(checksums(file)))
        # By file and entry, the ranges of it that were read, and their CRCs.
        self._read: dict[tuple[str, Checksum], dict[tuple[int, int], int]] = {}

    def note(self, file: str, start: int, memory: np.ndarray) -> None:
        """Takes bytes that were read, uint8, from `start` of a file on.

        Raises:
          FormatError: if checksums cannot be read.
        """
        listed, stop = self._listed(file), start + memory.nbytes
        first = bisect.bisect_right(listed, start, key=lambda entry: entry.stop)
        after = bisect.bisect_left(listed, stop, key=lambda entry: entry.start)
        for entry in listed[first:after]:
            low, high = max(start, entry.start), min(stop, entry.stop)
            crc = zlib.crc32(memory[low - start : high - start].data)
            self._read.setdefault((file, entry), {})[low, high] = crc

    def finish(self) -> None:
        """Compares the checksums of all entries of which something was read.

        Raises:
          FormatError: if an entry has another one.
        """
        while self._read:
            (file, entry), parts = self._read.popitem()
            at, crc = entry.start, 0
            for (start, stop), part in sorted(parts.items()):
                # A part that begins inside of what was read is read again.
                if start >= at:
                    crc = _continued(file, at, start, crc)
                    crc = _times(_power(stop - start), crc) ^ part
                    at = stop
            crc = _continued(file, at, entry.stop, crc)
            if crc != entry.crc:
                found = f"the CRC-32 {crc:08x}, not {entry.crc:08x}"
                raise checkpoint.damaged(file, entry.start, entry.stop, found)


def _continued(file: str, start: int, stop: int, crc: int) -> int:
    # The CRC with that of a range that was not read.
    if start < stop:
        with files.opened(file) as content:
            content.seek(start)
            for at in range(start, stop, _PIECE_BYTES):
                crc = zlib.crc32(content.read(min(_PIECE_BYTES, stop - at)), crc)
    return crc


@functools.lru_cache(maxsize=2**14)
def _power(num_bytes: int) -> int:
    # x to the number of bits, modulo the polynomial.
    power, square, rest = 1 << 31, 1 << 23, num_bytes
    while rest:
        if rest & 1:
            power = _times(power, square)
        square, rest = _times(square, square), rest >> 1
    return power


def _times(one: int, other: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
