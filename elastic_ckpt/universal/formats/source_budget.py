"""Limits what all files of a checkpoint may take together, in time and in memory.

A few bytes of a pickle stand for much memory, files are read by several threads, and a
name or a shape may be used again for each tensor. A checkpoint of many tensors is large
itself, so limits grow with the bytes that its files have on disk.
"""

from __future__ import annotations

import threading

from elastic_ckpt.universal.formats.format_error import FormatError

# Of the process that decodes pickles; the metadata of 1e6 empty tensors take 3e9 bytes
# and 10 seconds, of 1.6e9 on disk.
MOST_SECS = 8
_BYTES_PER_SEC = 50_000_000
MOST_MEMORY_BYTES = 1 << 29
_MEMORY_PER_BYTE = 3
# Names, values, ranges and fragments that readers make of what was decoded.
MOST_BYTES = 1 << 28
_BYTES_PER_BYTE = 2


class SourceBudget:
    """The limits of one checkpoint, for any number of threads.

    Args:
      stored_bytes: on disk, of files that are not added by `add_file`.

    Attributes:
      stored_bytes: with those that were added.
      secs: of a processor, that decoding pickles took.
    """

    def __init__(self, stored_bytes: int = 0) -> None:
        self._lock = threading.Lock()
        self.stored_bytes = stored_bytes
        self.secs = 0.0
        self._bytes = 0

    def add_file(self, stored_bytes: int) -> None:
        """Allows as much more as a file of this size may take."""
        with self._lock:
            self.stored_bytes += stored_bytes

    @property
    def memory_bytes(self) -> int:
        """The most that decoding a pickle may take."""
        return max(MOST_MEMORY_BYTES, self.stored_bytes * _MEMORY_PER_BYTE)

    @property
    def most_bytes(self) -> int:
        """The most that is made of what was decoded."""
        return max(MOST_BYTES, self.stored_bytes // _BYTES_PER_BYTE)

    @property
    def most_secs(self) -> float:
        """The seconds of a processor that decoding all pickles may take."""
        return max(MOST_SECS, self.stored_bytes / _BYTES_PER_SEC)

    def spend(self, secs: float) -> None:
        """Counts seconds of a processor."""
        with self._lock:
            self.secs += secs

    def take(self, num_bytes: int, place: str) -> None:
        """Counts memory.

        Args:
          num_bytes: about as many as will be allocated.
          place: the file that it is for, for messages.

        Raises:
          FormatError: if it is too much, with what was taken before.
        """
        with self._lock:
            self._bytes += num_bytes
            if self._bytes > self.most_bytes:
                raise FormatError(
                    f"{place} has values that take over {self.most_bytes} bytes, with"
                    " those of the files beside it; it was made to exhaust memory"
                )
