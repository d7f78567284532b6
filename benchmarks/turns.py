"""How the sides of a comparison take turns in one process."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import memory

# By side, the seconds of each round.
Secs = dict[str, list[float]]

# The allocator of C keeps what a side has freed, and each side frees other sizes.
_MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def timed(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    num_bytes: int = 0,
    after: Callable[[], object] = lambda: None,
) -> Secs:
    """The seconds of each side, one sample a round.

    A round before those that are counted is not. Each round begins with another side,
    and before each turn the garbage of the one before is collected, its memory is given
    back to the system, and free memory is touched.

    Args:
      sides: each does its work and waits for it.
      rounds: that are counted.
      num_bytes: that a side will allocate.
      after: called after each turn, whose result is gone by then.
    """
    secs: Secs = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for name in names:
            gc.collect()
            if num_bytes:
                _MALLOC_TRIM(0)
                memory.touch(num_bytes)
            began = time.perf_counter()
            result = sides[name]()
            took = time.perf_counter() - began
            if number:
                secs[name].append(took)
            del result
            after()
        names.append(names.pop(0))
    return secs


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process that has done nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
