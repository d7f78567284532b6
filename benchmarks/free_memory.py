"""The state of free memory before a turn, so that no side pays for another.

A virtual machine gives free memory back to its host after two seconds, and gets it
again page by page, which can take longer than all that is measured.
"""

from __future__ import annotations

import time

from elastic_ckpt.core import host_memory

_MOST_TOUCHES = 3


def touch(num_bytes: int, *, warm_secs: float) -> None:
    """Touches free memory until that takes less than `warm_secs`, three times at most.

    Args:
      num_bytes: that the turn will allocate.
      warm_secs: for memory that the machine has.
    """
    for _ in range(_MOST_TOUCHES):
        began = time.perf_counter()
        memory = host_memory.allocate(num_bytes)
        memory[::4096] = 1
        del memory
        if time.perf_counter() - began < warm_secs:
            return
