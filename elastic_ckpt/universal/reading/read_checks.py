"""Compares the checksums of what a plan reads, of which every host reads a part.

A CRC-32 is that of a whole entry of a file, and a host needs some of its bytes. The CRC
of a range follows from those of its parts (`combined`): so each host computes those of
the bytes that it reads anyway, the bytes that no host needs are dealt to the hosts that
read others of the same entry, and all of these compare the whole. Together the hosts
read each entry once, and a byte that a host hands out was checked as it has read it.

Algorithm: `crc32_combine` of zlib, a product of polynomials modulo that of CRC-32.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.core.storage import Json
from elastic_ckpt.universal.formats import opened, source_files
from elastic_ckpt.universal.plan.load_plan import LoadPlan
from elastic_ckpt.universal.stored import Checkpoint, Checksum

_KIND = "universal_reads"
# For hosts that read for longer than others. JAX ends all where one is dead.
_TIMEOUT_SECS = 6 * 3600.0
_PIECE_BYTES = 1 << 24
_POLYNOMIAL = 0xEDB88320

if TYPE_CHECKING:
    from elastic_ckpt.core.allgather import Allgather

# A range of bytes: the first, and the one after the last.
_Range = tuple[int, int]


class ReadChecks:
    """The checksums of the files of a plan; any thread may call `note`.

    All hosts of a world make it, and then either `finish` or call `fail`.

    Args:
      checkpoint: that is open.
      plan: of this host.
      files: those of the plan whose checksums are compared.
      allgather: of the hosts that read the checkpoint together.

    Attributes:
      unverified: the files for which the format has no checksum.
      extra_bytes: that are read to check them, beside those of the plan.

    Raises:
      FormatError: if checksums cannot be read, or a digest of a whole range differs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: LoadPlan,
        files: Iterable[str],
        allgather: Allgather,
    ) -> None:
        self._plan = plan
        self._allgather = allgather
        self._lock = threading.Lock()
        self.unverified: list[str] = []
        self.extra_bytes = 0
        # By file: the entries that are read in part, and their segments by first byte.
        self._entries: dict[str, list[Checksum]] = {}
        self._segments: dict[str, dict[int, int]] = {}
        self._starts: dict[str, list[int]] = {}
        self._gaps: dict[str, list[_Range]] = collections.defaultdict(list)
        self._crcs: dict[str, dict[int, int]] = collections.defaultdict(dict)
        spans = self._spans(set(files))
        everyone = _agreed(
            allgather,
            lambda: {
                file: self._needed(checkpoint, file, of_file)
                for file, of_file in spans.items()
            },
        )
        for file, entries in self._entries.items():
            ranges = [each.get(file, ()) for each in everyone]
            self._divide(file, entries, ranges)

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
          FormatError: if an entry has another one, on every host that read some of it.
          RunError: if another host has failed, with its message.
        """
        everyone = _agreed(self._allgather, self._all_crcs)
        for file, entries in self._entries.items():
            found: dict[int, int] = {}
            for each in everyone:
                for at, crc in each.get(file, ()):
                    if found.setdefault(at, crc) != crc:
                        stop = self._segments[file].get(at, at)
                        found_here = "different bytes on two hosts"
                        raise opened.damaged(file, at, stop, found_here)
            for entry in entries:
                self._compare(file, entry, found)

    def _all_crcs(self) -> Json:
        for file, gaps in self._gaps.items():
            with source_files.opened(file) as content:
                for start, stop in gaps:
                    content.seek(start)
                    crc = 0
                    for at in range(start, stop, _PIECE_BYTES):
                        piece = content.read(min(_PIECE_BYTES, stop - at))
                        crc = zlib.crc32(piece, crc)
                    self._crcs[file][start] = crc
        return {
            file: [list(each) for each in held.items()]
            for file, held in self._crcs.items()
        }

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
    ) -> list[list[int]]:
        # The parts of entries that this host reads, ascending.
        listed = sorted(checkpoint.checksums(file))
        if not listed:
            self.unverified.append(file)
        merged = source_files.merged_spans(spans)
        starts = [start for start, _ in merged]
        needed: list[_Range] = []
        entries: list[Checksum] = []
        whole: list[Checksum] = []
        for entry in listed:
            first = max(0, bisect.bisect_right(starts, entry.start) - 1)
            inside = [
                (max(start, entry.start), min(stop, entry.stop))
                for start, stop in merged[
                    first : bisect.bisect_left(starts, entry.stop)
                ]
                if start < entry.stop and entry.start < stop
            ]
            if not inside:
                continue
            if isinstance(entry.digest, bytes):
                whole.append(entry)
                continue
            entries.append(entry)
            needed += inside
        opened.compare(file, whole)
        self._entries[file] = entries
        # The bounds of this host's spans are those of segments, too.
        ends = sorted({end for span in spans for end in span})
        return [[start, stop] for start, stop in _cut(needed, ends)]

    def _divide(
        self,
        file: str,
        entries: Sequence[Checksum],
        ranges: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        bounds = sorted({end for of_host in ranges for span in of_host for end in span})
        segments = self._segments[file] = {}
        merged = source_files.merged_spans
        by_host = [merged((a, b) for a, b in of_host) for of_host in ranges]
        held = merged(each for of_host in by_host for each in of_host)
        for entry in entries:
            ends = [entry.start, *_between(bounds, entry.start, entry.stop), entry.stop]
            readers = [
                host
                for host, of_host in enumerate(by_host)
                if _overlap(of_host, entry.start, entry.stop)
            ]
            for number, (start, stop) in enumerate(itertools.pairwise(ends)):
                segments[start] = stop
                # A segment is read whole by a host, or by none.
                if _overlap(held, start, stop):
                    continue
                if readers[number % len(readers)] == self._allgather.host:
                    self._gaps[file].append((start, stop))
                    self.extra_bytes += stop - start
        self._starts[file] = sorted(segments)

    def _compare(self, file: str, entry: Checksum, crcs: dict[int, int]) -> None:
        at, crc = entry.start, 0
        while at < entry.stop:
            stop = self._segments[file][at]
            crc = combined(crc, crcs[at], stop - at)
            at = stop
        if crc != entry.digest:
            found = f"the CRC-32 {crc:08x}, not {entry.digest:08x}"
            raise opened.damaged(file, entry.start, entry.stop, found)


def fail(allgather: Allgather, error: BaseException) -> None:
    """Tells the hosts that make `ReadChecks` or finish them that this one failed."""

    def part() -> Json:
        raise errors.CheckpointError(str(error)) from error

    with contextlib.suppress(errors.ElasticCkptError):
        _agreed(allgather, part)


def _agreed(hosts: Allgather, part: Callable[[], Json]) -> list[Any]:
    # The import of JAX takes seconds, which conversions do not need.
    from elastic_ckpt.core import allgather

    return allgather.agreed(hosts, _KIND, part, timeout_secs=_TIMEOUT_SECS)


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
