"""The memory of this process, and that of the machine before a turn."""

from __future__ import annotations

import pathlib
import time

from elastic_ckpt.core import host_memory

_MOST_TOUCHES = 3
# A turn may be given other pages than those freed last: touched only once, every other
# turn took three times as long.
_TIMES_TURN = 2
_WARM_SECS_PER_GIB = 0.25


def resident_bytes(kind: str) -> int:
    """Bytes of this process that Linux calls `VmRSS`, or `VmHWM`, the most so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(kind)


def touch(num_bytes: int) -> None:
    """Touches free memory until the machine has it, three times at most.

    A virtual machine gives free memory back to its host after two seconds, and gets it
    again page by page, which can take longer than all that is measured. Twice as much
    is touched as the turn will allocate.
    """
    touched = _TIMES_TURN * num_bytes
    for _ in range(_MOST_TOUCHES):
        began = time.perf_counter()
        memory = host_memory.allocate(touched)
        memory[::4096] = 1
        del memory
        if time.perf_counter() - began < _WARM_SECS_PER_GIB * touched / 2**30:
            return
