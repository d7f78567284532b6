"""How loads of suite `universal` take turns."""

from __future__ import annotations

import collections
import ctypes
import gc
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import free_memory

# The allocator of C keeps what a side has freed, and each side frees other sizes.
_MALLOC_TRIM = ctypes.CDLL(None).malloc_trim


def timed(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    num_bytes: int,
    alike: Collection[str] = (),
) -> dict[str, list[float]]:
    """The secs of each side, one sample a round.

    A round before those that are counted is not. Each round begins with another side,
    and before each turn the garbage of the one before is collected, its memory is given
    back to the system, and free memory is touched.

    Args:
      sides: each makes a tree of arrays.
      rounds: that are counted.
      num_bytes: of the arrays of a side.
      alike: the sides whose values are compared in the first round, among those of
        equal structure.
    """
    secs: dict[str, list[float]] = {name: [] for name in sides}
    digests: dict[Any, set[int]] = collections.defaultdict(set)
    names = list(sides)
    for number in range(rounds + 1):
        for name in names:
            gc.collect()
            _MALLOC_TRIM(0)
            free_memory.touch(num_bytes)
            began = time.perf_counter()
            state = jax.block_until_ready(sides[name]())
            if number:
                secs[name].append(time.perf_counter() - began)
            elif name in alike:
                digests[jax.tree.structure(state)].add(_digest(state))
            del state
        names.append(names.pop(0))
    assert all(len(each) == 1 for each in digests.values()), f"{alike} differ"
    return secs


def _digest(state: Any) -> int:
    value = 0
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            value = zlib.crc32(np.ascontiguousarray(shard.data).data, value)
    return value
