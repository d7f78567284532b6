"""Runs the sides of a comparison in turns in one process; manages its memory."""

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
# A turn may get different pages from those freed last: with pages touched only once,
# every other turn took three times as long.
_TIMES_TURN = 2
_WARM_SECS_PER_GIB = 0.25

# C's allocator keeps memory that a side has freed, and each side frees different sizes.
_MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def timed(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    num_bytes: int = 0,
    after: Callable[[], object] = lambda: None,
) -> Secs:
    """The seconds of each side, which waits for its work; one sample per round.

    The first round is not counted. Each round begins with a different side. Before each
    turn, the previous turn's garbage is collected, its memory is returned to the
    system, and the `num_bytes` that a side will allocate are touched. `after` is called
    after each turn, once the result has been freed.
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
    """The result of a call in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_gib() -> float:
    """The peak memory of this process so far, or since `growth_gib` began."""
    return _status_gib("VmHWM")


def growth_gib(function: Callable[[], Any]) -> float:
    """The memory that this process has at the peak of a call beyond that before it.

    Mapped files count while they are resident. The result is alive at the end.
    """
    gc.collect()
    _MALLOC_TRIM(0)
    # Resets the peak (proc(5)).
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status_gib("VmRSS")
    result = function()
    peak = peak_gib()
    del result
    return peak - before


def _status_gib(field: str) -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"{field}:\s+(\d+) kB", status)
    return int(kib) / 2**20


def touch(num_bytes: int) -> None:
    """Touches free memory until the machine has it, at most three times.

    A virtual machine returns free memory to its host after two seconds and gets it back
    page by page, which can take longer than the measurement itself. The function
    touches twice the memory that the turn will allocate.
    """
    touched = _TIMES_TURN * num_bytes
    for _ in range(_MOST_TOUCHES):
        began = time.perf_counter()
        memory = host_memory.allocate(touched)
        memory[::4096] = 1
        del memory
        if time.perf_counter() - began < _WARM_SECS_PER_GIB * touched / 2**30:
            return
