"""Host memory for arrays: allocated on huge pages and reused.

The kernel allocates fresh memory page by page at the first access. On virtual machines,
this takes five times as long as the copy itself. Pages of 2 MiB and a pool of memory
for reuse avoid this cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import re
import resource
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import psutil

_HUGE_PAGE_BYTES = 2 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *3 * [ctypes.c_int],
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def allocate(num_bytes: int) -> np.ndarray:
    """Fresh memory, uint8 `[num_bytes]`, aligned to at least 64 bytes."""
    if num_bytes < _HUGE_PAGE_BYTES:
        memory = np.empty(num_bytes + 63, np.uint8)
        skipped = -memory.ctypes.data % 64
        return memory[skipped : skipped + num_bytes]
    rounded = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Some kernels, mostly in sandboxes, have no huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:num_bytes]


def map_file(
    descriptor: int, num_bytes: int, *, flags: int, writes: bool
) -> np.ndarray:
    """Maps the beginning of an open file, which may be closed afterwards.

    Before Python 3.13, `mmap.mmap` keeps a duplicate of the descriptor, so a state's
    files would exceed the limit of open files.

    Returns:
      The file's memory, uint8 `[num_bytes]`.

    Raises:
      OSError: if the file cannot be mapped.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    address = _LIBC.mmap(None, num_bytes, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Threads may use the memory until the process ends.
    unmapped = weakref.finalize(pages, _LIBC.munmap, address, num_bytes)
    unmapped.atexit = False  # pyrefly: ignore
    memory = np.frombuffer(memoryview(pages), np.uint8)
    memory.flags.writeable = writes
    return memory


def available_bytes() -> int:
    """How many bytes this process can still allocate.

    The limits are the machine's free memory, control groups, `RLIMIT_DATA` and
    `RLIMIT_AS`.
    """
    used = psutil.Process().memory_info()
    free = [psutil.virtual_memory().available, *_of_control_groups()]
    for limit, used_bytes in (
        (resource.RLIMIT_DATA, used.data),
        (resource.RLIMIT_AS, used.vms),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free.append(most - used_bytes)
    return max(0, min(free))


def _of_control_groups() -> Iterator[int]:
    # Version 2 only: this process's group and its ancestors.
    with contextlib.suppress(OSError):
        own = re.search(
            "^0::/(.*)", pathlib.Path("/proc/self/cgroup").read_text(), re.M
        )
        group = pathlib.Path("/sys/fs/cgroup", own[1] if own else "")
        for each in (group, *group.parents):
            # Some groups have no limit: `max`.
            with contextlib.suppress(OSError, ValueError):
                most = int((each / "memory.max").read_text())
                used = int((each / "memory.current").read_text())
                stat = (each / "memory.stat").read_text()
                # The kernel reclaims the cache of unused files.
                cached = re.search(r"^inactive_file (\d+)$", stat, re.M)
                yield most - used + (int(cached[1]) if cached else 0)


class Pool:
    """A thread-safe pool of reusable memory."""

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

    def has(self, num_bytes: int) -> bool:
        """Whether `take` can reuse memory instead of allocating it."""
        with self._lock:
            return bool(self._free.get(num_bytes))

    def release(self, memory: np.ndarray) -> None:
        """Returns memory from `take` to the pool; nothing may refer to it afterward."""
        with self._lock:
            self._free.setdefault(memory.nbytes, []).append(memory)
