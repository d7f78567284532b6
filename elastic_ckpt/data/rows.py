"""Pure functions that determine each row's shard and the hosts that run each shard.

A run reads S logical shards, and its batches have B rows. With g = gcd(B, S), rows and
shards fall into g classes of b = B / g consecutive rows and m = S / g consecutive
shards. Each class of rows is filled from the class of shards with the same index, one
shard after another. So a host runs the shards of the classes in which it has rows. If
the number of hosts divides S and B, and each host has consecutive rows, in host order,
a host runs the same shards for every B.

How many rows a shard has yielded depends only on the history (the batch sizes so far),
not on the hosts.

Notation: row r of a batch, shard s, batch n of a period; S shards, B rows in a batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from elastic_ckpt.core import errors

Array: TypeAlias = Any  # an int or an array of ints
# Periods of identical batches: the rows of a batch, and the number of batches.
History = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The rows of each batch that one host loads.

    Attributes:
      global_batch_size: B.
      held: the rows that the host loads, int64, in ascending order.
      later: the rows that the host would load in batches of other sizes, keyed by size.
      every: the interval between the batches that the host takes; other workers of the
        same PyTorch loader take the rest.
      first: the number of batches that the host skips before its first.
    """

    global_batch_size: int
    held: np.ndarray
    later: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    every: int = 1
    first: int = 0

    def shards(self, num_shards: int, number: int = 0) -> np.ndarray:
        """The shards that the host runs from batch `number` of a period on."""
        now = host_shards(
            num_shards,
            self.global_batch_size,
            self.held,
            every=self.every,
            first=number + self.first,
        )
        later = [host_shards(num_shards, *each) for each in self.later.items()]
        return np.unique(np.concatenate([now, *later]))


def in_order(
    num_hosts: int, global_batch_size: int, *, later: Iterable[int] = ()
) -> list[Placement]:
    """The placement of every host; host h loads the h-th part of the batch."""

    def held(host: int, size: int) -> np.ndarray:
        return np.arange(host * size // num_hosts, (host + 1) * size // num_hosts)

    return [
        Placement(
            global_batch_size=global_batch_size,
            held=held(host, global_batch_size),
            later={size: held(host, size) for size in later},
        )
        for host in range(num_hosts)
    ]


def _classes(num_shards: int, size: int) -> tuple[int, int]:
    # The number of rows, and the number of shards, in a class.
    number = math.gcd(num_shards, size)
    return size // number, num_shards // number


def batch_shards(num_shards: int, size: int, number: int) -> np.ndarray:
    """The shard of each row of batch `number` of a period, int64 `[B]`.

    Rows of the same shard are in the order in which the shard yields them.
    """
    rows, shards = _classes(num_shards, size)
    row = np.arange(size)
    return row // rows * shards + (number * rows + row % rows) % shards


def emitted(num_shards: int, history: History) -> np.ndarray:
    """The number of rows that each shard has yielded, int64 `[S]`."""
    total = np.zeros(num_shards, np.int64)
    for size, batches in history:
        total += shard_rows(num_shards, np.arange(num_shards), size, batches)
    return total


def shard_rows(num_shards: int, shard: Array, size: int, batches: Array) -> Array:
    """The number of rows that shards yield in the first `batches` of a period."""
    rows, shards = _classes(num_shards, size)
    return (batches * rows + shards - 1 - shard % shards) // shards


def host_shards(
    num_shards: int, size: int, held: np.ndarray, *, every: int = 1, first: int = 0
) -> np.ndarray:
    """The shards that a host with these rows runs until the batch size changes.

    The host takes every `every`-th batch, from batch `first` of the period on.
    """
    rows, shards = _classes(num_shards, size)
    stride = math.gcd(every, shards)
    starts = held // rows * shards + (first * rows + held % rows) % stride
    return np.unique(np.unique(starts)[:, None] + np.arange(0, shards, stride))


def shard_hosts(
    num_shards: int, size: int, held: Mapping[int, np.ndarray]
) -> np.ndarray:
    """The host that saves each shard, int64 `[S]`: the first that runs it."""
    hosts = np.empty(num_shards, np.int64)
    for host in sorted(held, reverse=True):
        hosts[host_shards(num_shards, size, held[host])] = host
    return hosts


def shard_reads(num_shards: int, placements: Iterable[Placement]) -> float:
    """The mean number of hosts that run a shard; those with the same rows are one."""
    distinct = {(each.held.tobytes(), each.first): each for each in placements}
    return sum(each.shards(num_shards).size for each in distinct.values()) / num_shards


def num_rows(history: History) -> int:
    """The number of rows in all batches."""
    return sum(size * batches for size, batches in history)


def batches_of(history: History, size: int) -> int:
    """The number of batches in the current period; 0 if its size is not `size`."""
    return history[-1][1] if history and history[-1][0] == size else 0


def after(history: History, size: int, batches: int = 1) -> History:
    """The history after `batches` more batches of `size` rows."""
    so_far = batches_of(history, size)
    return (*(history[:-1] if so_far else history), (size, so_far + batches))


def suggest_num_shards(
    hosts: Sequence[int], batches: Sequence[int], loader_workers: Sequence[int] = (1,)
) -> int:
    """Returns the smallest number of logical shards that avoids repeated reads.

    With it, each shard is read by only one host and one worker of a PyTorch loader.

    Args:
      hosts: the host counts that the run may have.
      batches: the global batch sizes that the run may have; each host count is only
        combined with the sizes that it divides.
      loader_workers: the worker counts that each rank's `ec.data.TorchLoader` may have.

    Returns:
      S, for `ec.data.sharded` or `num_logical_shards`.

    Raises:
      ConfigError: if no number of hosts divides a batch size.
    """
    for size in batches:
        if all(size % num_hosts for num_hosts in hosts):
            raise errors.ConfigError(
                f"none of the host counts {sorted(hosts)} divides the batch size"
                f" {size}; choose a batch size that is a multiple of a host count"
            )
    if any(number > 1 for number in loader_workers):
        # Workers take whole batches round-robin, so each batch needs its own shards.
        return math.lcm(*(b * max(w, 1) for b in batches for w in loader_workers))
    return math.lcm(*hosts)
