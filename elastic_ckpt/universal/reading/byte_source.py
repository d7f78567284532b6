"""Sources of bytes: local files, and objects in a bucket."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from elastic_ckpt.core import bucket_clients


class ByteSource(Protocol):
    """Reads ranges of files; any number of threads may call it."""

    def range_of(self, file: str, start: int, stop: int) -> tuple[int, int]:
        """The range that is read if the bytes from `start` to `stop` are needed."""
        del file
        return start, stop

    def request_bytes(self, file: str, num_bytes: int, *, is_direct: bool) -> int:
        """The most memory that a request takes beside the buffers.

        Args:
          file: as above.
          num_bytes: of the range that is read.
          is_direct: whether it is read into buffers; else it is read into other memory,
            which counts.
        """
        ...

    def read_into(self, file: str, start: int, parts: Sequence[np.ndarray]) -> int:
        """Fills parts, uint8, one after the other.

        Args:
          file: its path, URL or name.
          start: of the range.
          parts: in which the bytes go, as many as `range_of` has.

        Returns:
          The number of bytes; less than those of the parts if the file ends before.

        Raises:
          OSError: if the file cannot be read; or one of `bucket_clients.failures`, or a
            ValueError of TensorStore.
        """
        ...

    def close(self) -> None:
        """Closes what the calling thread has opened."""
        return


def scatter(whole: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Copies bytes into parts, one after the other; fewer bytes fill the first ones."""
    done = 0
    for part in parts:
        read = whole[done : done + part.nbytes]
        part[: len(read)] = read
        done += len(read)


class LocalFiles(ByteSource):
    """Reads files of this machine; a thread keeps the last one open."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def request_bytes(self, file: str, num_bytes: int, *, is_direct: bool) -> int:
        """See `ByteSource`."""
        del file
        return 0 if is_direct else num_bytes

    def read_into(self, file: str, start: int, parts: Sequence[np.ndarray]) -> int:
        """See `ByteSource`."""
        descriptor = self._opened(file)
        pending = [part.data for part in parts if part.nbytes]
        done = 0
        while pending:
            count = os.preadv(descriptor, pending, start + done)
            if not count:
                break
            done += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]
        return done

    def close(self) -> None:
        """See `ByteSource`."""
        descriptor = getattr(self._of_thread, "descriptor", None)
        if descriptor is not None:
            self._of_thread.descriptor = None
            os.close(descriptor)

    def _opened(self, file: str) -> int:
        last = self._of_thread
        if getattr(last, "descriptor", None) is None or last.file != file:
            self.close()
            last.descriptor, last.file = os.open(file, os.O_RDONLY | os.O_CLOEXEC), file
        return last.descriptor


class RemoteFiles(ByteSource):
    """Reads objects in any store that fsspec supports, by ranged requests."""

    def request_bytes(self, file: str, num_bytes: int, *, is_direct: bool) -> int:
        """See `ByteSource`."""
        del file
        # A client returns bytes of its memory.
        return num_bytes if is_direct else 2 * num_bytes

    def read_into(self, file: str, start: int, parts: Sequence[np.ndarray]) -> int:
        """See `ByteSource`."""
        system, path = bucket_clients.opened(file)
        stop = start + sum(part.nbytes for part in parts)
        content = system.cat_file(path, start=start, end=stop)
        scatter(np.frombuffer(content, np.uint8), parts)
        return len(content)
