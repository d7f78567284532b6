"""Limits what all files of a checkpoint may take together, in time and in memory.

A few bytes of a pickle stand for much memory, files are read by several threads, and a
name or a shape may be used again for each tensor. A checkpoint of many tensors is large
itself, so limits grow with the bytes that its files have on disk.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Generator, Iterator

from elastic_ckpt.universal.formats.format_error import FormatError

# So many opcodes take less than 1 GiB, and about ten seconds.
MOST_OPERATIONS = 4_000_000
# The metadata of an empty tensor have so many for each opcode that they take.
_BYTES_PER_OPERATION = 4
# Names, values, ranges and fragments that readers make of what was decoded.
MOST_BYTES = 1 << 28
_BYTES_PER_BYTE = 2
# Opcodes that a thread gets at a time.
_SLICE = 1 << 16


class SourceBudget:
    """The limits of one checkpoint, for any number of threads.

    Args:
      stored_bytes: on disk, of files that are not added by `add_file`.

    Attributes:
      stored_bytes: with those that were added.
    """

    def __init__(self, stored_bytes: int = 0) -> None:
        # Generators that end may be collected while it is held.
        self._lock = threading.RLock()
        self.stored_bytes = stored_bytes
        self._operations = 0
        self._bytes = 0

    def add_file(self, stored_bytes: int) -> None:
        """Allows as much more as a file of this size may take."""
        with self._lock:
            self.stored_bytes += stored_bytes

    def operations(self) -> Iterator[None]:
        """Yields once for each opcode that may be decoded."""
        return itertools.chain.from_iterable(self._slices())

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
            most = max(MOST_BYTES, self.stored_bytes // _BYTES_PER_BYTE)
            if self._bytes > most:
                raise FormatError(
                    f"{place} has values that take over {most} bytes, with those of"
                    " the files beside it; it was made to exhaust memory"
                )

    def _slices(self) -> Generator[Iterator[None], None, None]:
        while size := self._taken():
            slice_ = itertools.repeat(None, size)
            try:
                yield slice_
            finally:
                with self._lock:
                    self._operations -= operator.length_hint(slice_)

    def _taken(self) -> int:
        with self._lock:
            most = max(MOST_OPERATIONS, self.stored_bytes // _BYTES_PER_OPERATION)
            size = min(_SLICE, most - self._operations)
            self._operations += size
            return size
