"""An open checkpoint of any format, as its opener has read its structure."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import IO, Any

from elastic_ckpt.core import storage
from elastic_ckpt.universal.formats import source_files
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.stored import Checksum, StoredTensor

# Files whose checksums are compared at a time: each is read piece by piece.
_THREADS = 4
# Pieces of a file of this machine stay in the cache of the processor.
_PIECE_BYTES, _LOCAL_PIECE_BYTES = 16 << 20, 1 << 20


def no_checksums(file: str) -> Sequence[Checksum]:
    """Those of a format that has none."""
    del file
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """See `stored.Checkpoint`.

    Attributes:
      format: its name, for people.
      tensors: a name, its kind and its ranks together occur once.
      axes: the number of ranks by axis.
      values: numbers and texts beside the tensors, by path.
      checksums: of ranges of a file; it is called by several threads.
    """

    format: str
    tensors: Sequence[StoredTensor]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checksums: Callable[[str], Sequence[Checksum]] = no_checksums

    def check(self, files: Sequence[str]) -> list[str]:
        """Compares the checksums that the format has of these files.

        Returns:
          Those that have no checksum.

        Raises:
          FormatError: if a range of a file has another checksum.
        """
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as pool:
            checked = pool.map(self._check, files)
            return [
                file
                for file, is_verified in zip(files, checked, strict=True)
                if not is_verified
            ]

    def _check(self, file: str) -> bool:
        listed = self.checksums(file)
        if listed:
            with source_files.opened(file) as content:
                for each in sorted(listed, key=lambda checksum: checksum.start):
                    _compare(content, file, each)
        return bool(listed)


def _compare(content: IO[bytes], file: str, checksum: Checksum) -> None:
    start, stop, expected = checksum
    piece = _LOCAL_PIECE_BYTES if storage.is_local(file) else _PIECE_BYTES
    crc = 0
    content.seek(start)
    for at in range(start, stop, piece):
        crc = zlib.crc32(content.read(min(piece, stop - at)), crc)
    if crc != expected:
        raise damaged(file, start, stop, f"the CRC-32 {crc:08x}, not {expected:08x}")


def damaged(file: str, start: int, stop: int, found: str) -> FormatError:
    """The error about bytes of a file that are not those that were written."""
    return FormatError(
        f"{file} is damaged: its bytes {start} to {stop} have {found}; copy it again"
        " from the place that it was written to, or use another step"
    )
