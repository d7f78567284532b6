"""Compares the checksums of what a plan reads, while it is read.

A CRC-32 is that of a whole entry of a file, and a host needs some of its bytes. The CRC
of a range follows from those of its parts (`combined`): so the CRCs of the bytes that
are read anyway are computed as they are read, and only the other bytes of their entries
are read in addition.

Algorithm: `crc32_combine` of zlib, a product of polynomials modulo that of CRC-32.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import threading
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, Checksum, damaged
from elastic_ckpt.universal.plan.load_plan import LoadPlan

_PIECE_BYTES = 1 << 24
_POLYNOMIAL = 0xEDB88320

# A range of bytes: the first, and the one after the last.
_Range = tuple[int, int]


class ReadChecks:
    """The checksums of the files of a plan; any thread may call `note`.

    Args:
      checkpoint: that is open.
      plan: of this host.
      files: those of the plan whose checksums are compared.

    Attributes:
      unverified: the files for which the format has no checksum.
      extra_bytes: that are read to check them, beside those of the plan.

    Raises:
      FormatError: if checksums cannot be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: LoadPlan,
        files: Iterable[str],
    ) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self.unverified: list[str] = []
        self.extra_bytes = 0
        # By file: the entries that are read in part, and their segments by first byte.
        self._entries: dict[str, list[Checksum]] = {}
        self._segments: dict[str, dict[int, int]] = {}
        self._starts: dict[str, list[int]] = {}
        self._gaps: dict[str, list[_Range]] = collections.defaultdict(list)
        self._crcs: dict[str, dict[int, int]] = collections.defaultdict(dict)
        for file, spans in self._spans(set(files)).items():
            self._divide(file, self._needed(checkpoint, file, spans))

    def note(self, file: str, start: int, parts: Sequence[np.ndarray]) -> None:
        """Takes bytes that were read, from `start` of a file on."""
        segments = self._segments.get(file)
        if segments is None:
            return
        stop = start + sum(part.nbytes for part in parts)
        starts = self._starts[file]
        first = bisect.bisect_left(starts, start)
        for at in starts[first : bisect.bisect_left(starts, stop, first)]:
            crc, offset = 0, start
            for part in parts:
                low = max(0, at - offset)
                high = min(part.nbytes, segments[at] - offset)
                if low < high:
                    crc = zlib.crc32(part[low:high].data, crc)
                offset += part.nbytes
            with self._lock:
                self._crcs[file][at] = crc

    def finish(self) -> None:
        """Compares all checksums, when all bytes of the plan were read.

        Raises:
          FormatError: if an entry has another one.
        """
        for file, gaps in self._gaps.items():
            with files.opened(file) as content:
                for start, stop in gaps:
                    content.seek(start)
                    crc = 0
                    for at in range(start, stop, _PIECE_BYTES):
                        piece = content.read(min(_PIECE_BYTES, stop - at))
                        crc = zlib.crc32(piece, crc)
                    self._crcs[file][start] = crc
        for file, entries in self._entries.items():
            for entry in entries:
                self._compare(file, entry, self._crcs[file])

    def _spans(self, files: set[str]) -> dict[str, list[_Range]]:
        spans = self._plan.spans
        found: dict[str, list[_Range]] = {}
        columns = (column.tolist() for column in (spans.file, spans.start, spans.stop))
        for number, start, stop in zip(*columns, strict=True):
            file = self._plan.files[number]
            if file in files:
                found.setdefault(file, []).append((start, stop))
        return found

    def _needed(
        self, checkpoint: Checkpoint, file: str, spans: list[_Range]
    ) -> list[_Range]:
        # The parts of entries that this host reads, ascending.
        listed = sorted(checkpoint.checksums(file))
        if not listed:
            self.unverified.append(file)
        merged = files.merged_spans(spans)
        starts = [start for start, _ in merged]
        needed: list[_Range] = []
        entries: list[Checksum] = []
        for entry in listed:
            first = max(0, bisect.bisect_right(starts, entry.start) - 1)
            inside = [
                (max(start, entry.start), min(stop, entry.stop))
                for start, stop in merged[
                    first : bisect.bisect_left(starts, entry.stop)
                ]
                if start < entry.stop and entry.start < stop
            ]
            if inside:
                entries.append(entry)
                needed += inside
        self._entries[file] = entries
        # The bounds of spans are those of segments, too.
        ends = sorted({end for span in spans for end in span})
        return _cut(needed, ends)

    def _divide(self, file: str, needed: Sequence[_Range]) -> None:
        bounds = sorted({end for span in needed for end in span})
        segments = self._segments[file] = {}
        held = files.merged_spans(needed)
        for entry in self._entries[file]:
            ends = [entry.start, *_between(bounds, entry.start, entry.stop), entry.stop]
            for start, stop in itertools.pairwise(ends):
                segments[start] = stop
                # A segment is read whole, or not at all.
                if not _overlap(held, start, stop):
                    self._gaps[file].append((start, stop))
                    self.extra_bytes += stop - start
        self._starts[file] = sorted(segments)

    def _compare(self, file: str, entry: Checksum, crcs: dict[int, int]) -> None:
        at, crc = entry.start, 0
        while at < entry.stop:
            stop = self._segments[file][at]
            crc = combined(crc, crcs[at], stop - at)
            at = stop
        if crc != entry.crc:
            found = f"the CRC-32 {crc:08x}, not {entry.crc:08x}"
            raise damaged(file, entry.start, entry.stop, found)


def _overlap(merged: Sequence[_Range], start: int, stop: int) -> bool:
    at = bisect.bisect_right(merged, (start, 1 << 62)) - 1
    before = at >= 0 and merged[at][1] > start
    return before or (at + 1 < len(merged) and merged[at + 1][0] < stop)


def _cut(ranges: Iterable[_Range], bounds: Sequence[int]) -> list[_Range]:
    made = []
    for start, stop in ranges:
        ends = [start, *_between(bounds, start, stop), stop]
        made += itertools.pairwise(ends)
    return made


def _between(bounds: Sequence[int], start: int, stop: int) -> Sequence[int]:
    first, last = bisect.bisect_right(bounds, start), bisect.bisect_left(bounds, stop)
    return bounds[first:last]


def combined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two ranges one after the other.

    Args:
      first: the CRC-32 of the first.
      second: that of the second.
      second_bytes: the length of the second.
    """
    return _times(_power(second_bytes), first) ^ second


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
