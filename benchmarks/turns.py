"""How the sides of a comparison take turns in one process, and its memory."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.core import host_memory

# By side, the seconds of each round.
Secs = dict[str, list[float]]

_MOST_TOUCHES = 3
# A turn may be given other pages than those freed last: touched only once, every other
# turn took three times as long.
_TIMES_TURN = 2
_WARM_SECS_PER_GIB = 0.25

# The allocator of C keeps what a side has freed, and each side frees other sizes.
_MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def timed(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    num_bytes: int = 0,
    after: Callable[[], object] = lambda: None,
) -> Secs:
    """The seconds of each side, which waits for its work; one sample a round.

    A round before those that are counted is not. Each round begins with another side,
    and before each turn the garbage of the one before is collected, its memory is given
    back to the system, and the `num_bytes` that a side will allocate are touched.
    `after` is called after each turn, whose result is gone by then.
    """
    secs: Secs = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for name in names:
            gc.collect()
            if num_bytes:
                _MALLOC_TRIM(0)
                touch(num_bytes)
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


def peak_gib() -> float:
    """The most memory of this process so far."""
    status = pathlib.Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kib) / 2**20


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
