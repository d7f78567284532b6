"""Host memory for arrays: allocated on huge pages and reused.

The kernel allocates fresh memory page by page at the first access: on virtual machines
that takes five times as long as the copy itself. Pages of 2 MiB and a pool of used
memory avoid this cost.
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
    # Some kernels, mostly in sandboxes, have no huge pages: small ones remain.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:num_bytes]


class Pool:
    """A thread-safe pool of memory that is reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, num_bytes: int) -> np.ndarray:
        """Memory of exactly `num_bytes`, uint8, with undefined content."""
        with self._lock:
            kept = self._free.get(num_bytes)
            if kept:
                return kept.pop()
        return allocate(num_bytes)

    def give_back(self, memory: np.ndarray) -> None:
        """Returns memory from `take` to the pool; nothing may refer to it any more."""
        with self._lock:
            self._free.setdefault(memory.nbytes, []).append(memory)
