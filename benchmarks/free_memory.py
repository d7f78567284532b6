"""The state of free memory before a turn, so that no side pays for another.

A virtual machine gives free memory back to its host after two seconds, and gets it
again page by page, which can take longer than all that is measured.
"""

from __future__ import annotations

import time

from elastic_ckpt.core import host_memory

_MOST_TOUCHES = 3
# A turn may be given other pages than those freed last: touched only once, every other
# turn took three times as long.
_TIMES_TURN = 2
_WARM_SECS_PER_GIB = 0.25


def touch(num_bytes: int) -> None:
    """Touches free memory until the machine has it, three times at most.

    Args:
      num_bytes: that the turn will allocate; twice as many are touched.
    """
    touched = _TIMES_TURN * num_bytes
    for _ in range(_MOST_TOUCHES):
        began = time.perf_counter()
        memory = host_memory.allocate(touched)
        memory[::4096] = 1
        del memory
        if time.perf_counter() - began < _WARM_SECS_PER_GIB * touched / 2**30:
            return
