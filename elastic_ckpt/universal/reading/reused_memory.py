"""Memory of boxes that were written, for those that are read next.

The kernel takes longer to allocate fresh memory than to copy into it.
"""

from __future__ import annotations

import collections
import threading

import numpy as np

from elastic_ckpt.core import host_memory

# Smaller memory is allocated as fast as it is looked up.
_LEAST_BYTES = 2**18


class ReusedMemory:
    """Memory that is given back; any thread may call it.

    Args:
      most_bytes: of the memory that is kept; what exceeds it is freed, the oldest
        first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._free: collections.deque[np.ndarray] = collections.deque()
        self._free_bytes = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """Memory of `num_bytes`, uint8, with undefined content."""
        with self._lock:
            for number, memory in enumerate(self._free):
                if memory.nbytes == num_bytes:
                    del self._free[number]
                    self._free_bytes -= num_bytes
                    return memory
        return host_memory.allocate(num_bytes)

    def give_back(self, values: np.ndarray) -> None:
        """Keeps the memory of values, to which nothing may refer any more.

        Args:
          values: in memory that `take` has returned, all of it, of any dtype and shape.
        """
        if values.nbytes < _LEAST_BYTES:
            return
        memory = values.reshape(-1).view(np.uint8)
        with self._lock:
            self._free.append(memory)
            self._free_bytes += memory.nbytes
            while self._free_bytes > self._most_bytes:
                self._free_bytes -= self._free.popleft().nbytes
