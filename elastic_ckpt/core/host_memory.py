"""Host memory for arrays: allocated on huge pages and reused.

The kernel allocates fresh memory page by page at the first access: on virtual machines
that takes five times as long as the copy itself. Pages of 2 MiB and a pool of used
memory avoid this cost.
"""

from __future__ import annotations

import contextlib
import mmap
import pathlib
import resource
import sys
import threading
from collections.abc import Iterator, Sequence

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


def available_bytes() -> int:
    """What this process can still allocate before a limit of it or the machine.

    The limits are the machine's free memory, those of its control group, and
    `RLIMIT_DATA` and `RLIMIT_AS`.
    """
    free = [_kib(_lines("/proc/meminfo"), "MemAvailable")]
    status = _lines("/proc/self/status")
    for limit, used in (
        (resource.RLIMIT_DATA, "VmData"),
        (resource.RLIMIT_AS, "VmSize"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free.append(most - _kib(status, used))
    return max(0, min(*free, *_of_control_groups(), sys.maxsize))


def _of_control_groups() -> Iterator[int]:
    # Version 2 alone: of this process's group, and of those above it.
    for line in _lines("/proc/self/cgroup"):
        _, _, path = line.partition("0::/")
        group = (
            pathlib.Path("/sys/fs/cgroup", path) if line.startswith("0::/") else None
        )
        while group is not None and group.is_relative_to("/sys/fs/cgroup"):
            most = _lines(group / "memory.max")
            used = _lines(group / "memory.current")
            if used and most and most[0].isdecimal():
                # The kernel takes back what files that nobody uses take.
                cached = [
                    int(each.split()[1])
                    for each in _lines(group / "memory.stat")
                    if each.startswith("inactive_file ")
                ]
                yield int(most[0]) - int(used[0]) + sum(cached)
            group = group.parent


def _lines(path: str | pathlib.Path) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def _kib(lines: Sequence[str], name: str) -> int:
    # A number of KiB, in bytes; without limit if the system does not tell.
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 2**10
    return sys.maxsize


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

    def has(self, num_bytes: int) -> bool:
        """Whether `take` needs no fresh memory."""
        with self._lock:
            return bool(self._free.get(num_bytes))

    def give_back(self, memory: np.ndarray) -> None:
        """Returns memory from `take` to the pool; nothing may refer to it any more."""
        with self._lock:
            self._free.setdefault(memory.nbytes, []).append(memory)
