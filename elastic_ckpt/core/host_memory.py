"""Host memory for arrays: on huge pages, and used again.

The kernel gives fresh memory page by page when it is first touched: on virtual machines
that costs five times the copy itself. Pages of 2 MiB and memory that is kept make it
vanish.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

_HUGE_PAGE_BYTES = 2 * 2**20


def allocate(num_bytes: int) -> np.ndarray:
    """Fresh memory, uint8 `[num_bytes]`, aligned to 64 bytes at least."""
    if num_bytes < _HUGE_PAGE_BYTES:
        memory = np.empty(num_bytes + 63, np.uint8)
        skipped = -memory.ctypes.data % 64
        return memory[skipped : skipped + num_bytes]
    rounded = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Some kernels, of sandboxes above all, have no huge pages: these are small ones.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:num_bytes]


class Pool:
    """Memory that is kept when it is given back. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """Memory of exactly `num_bytes`, uint8, with whatever was in it."""
        with self._lock:
            kept = self._free.get(num_bytes)
            if kept:
                return kept.pop()
        return allocate(num_bytes)

    def give_back(self, memory: np.ndarray) -> None:
        """Takes back what `take` gave; nothing may refer to it any more."""
        with self._lock:
            self._free.setdefault(memory.nbytes, []).append(memory)

    def clear(self) -> None:
        """Lets go of all that was given back."""
        with self._lock:
            self._free.clear()
