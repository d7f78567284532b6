"""Rows, shards and hosts: pure functions from numbers to numbers.

The rows of a run form one stream. Its row number `g` is row `g // S` of logical shard
`g % S`, for S shards that never change. A batch of B rows at position `p` is the stream
from `p` to `p + B`. So a position is one number, it says how far each shard is, and
neither a batch size nor a number of hosts is part of it: both may change at any step.

Inside a batch the rows are arranged so that each shard can stay on one host:

* `blocked`, if S divides B (B = kS): sorted by shard, so rows `[sk, (s+1)k)` are those
  of shard `s`. A host that holds a whole number of such runs owns these shards.
* `windowed`, if B divides S: in the order of the stream. Row `r` comes from the shards
  that are `r + p` modulo B, at each step until B changes. Who holds row `r` owns them.
* `striped` otherwise: in the order of the stream, but loaded by host `g % H`, which
  owns the shards that are `h` modulo H. Each batch has the right rows; to stand in
  their places they have to be exchanged between hosts.

Glossary: g stream row, r row of a batch, s shard, h host; S, B, H are their numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import errors


class Arrangement(enum.Enum):
    """How the rows of a batch are arranged; see the module."""

    BLOCKED = "blocked"
    WINDOWED = "windowed"
    STRIPED = "striped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRows:
    """The rows of the batches of one size.

    Attributes:
      num_shards: S, frozen for the life of the run.
      global_batch_size: B, until it changes.
    """

    num_shards: int
    global_batch_size: int

    @property
    def arrangement(self) -> Arrangement:
        """How rows lie in a batch; it depends on B and S alone, never on the hosts."""
        if self.global_batch_size % self.num_shards == 0:
            return Arrangement.BLOCKED
        if self.num_shards % self.global_batch_size == 0:
            return Arrangement.WINDOWED
        return Arrangement.STRIPED

    def shards(self, position: int) -> np.ndarray:
        """The shard of each row of the batch at `position`, int64 `[B]`.

        The rows that a shard has in a batch follow each other as the shard yields them.
        """
        rows = np.arange(self.global_batch_size)
        if self.arrangement is Arrangement.BLOCKED:
            return rows // (self.global_batch_size // self.num_shards)
        return (position + rows) % self.num_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the rows of a batch lie, and the host that asks.

    Attributes:
      row_hosts: the host whose devices hold each row of a batch, int `[B]`, numbered
        from 0 without gaps; hosts that hold the same rows count as one.
      host: the number of the host that asks.
    """

    row_hosts: np.ndarray
    host: int

    @classmethod
    def in_order(
        cls, host: int, *, num_hosts: int, global_batch_size: int
    ) -> Placement:
        """`host` of H hosts, of which the h-th holds the h-th part of the rows."""
        if global_batch_size % num_hosts:
            raise errors.ConfigError(
                f"{global_batch_size} rows do not divide over {num_hosts} hosts; choose"
                f" a multiple of {num_hosts}"
            )
        row_hosts = np.repeat(np.arange(num_hosts), global_batch_size // num_hosts)
        return cls(row_hosts=row_hosts, host=host)

    @property
    def num_hosts(self) -> int:
        """H."""
        return int(self.row_hosts.max()) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows:
    """What one host loads of every batch, until B or the hosts change.

    Attributes:
      rows: the rows of a batch that the host loads, ascending, int64 `[B / H]`.
      shards: the shards that these rows come from, ascending; no other host has them.
      in_place: whether `rows` are those that the host's devices hold.
    """

    rows: np.ndarray
    shards: np.ndarray
    in_place: bool


def stream_rows(batch: BatchRows, position: int) -> np.ndarray:
    """The stream row of each row of the batch at `position`, int64 `[B]`."""
    shards = batch.shards(position)
    if batch.arrangement is not Arrangement.BLOCKED:
        return position + np.arange(batch.global_batch_size)
    # The j-th row of shard s in this batch is its row number emitted + j.
    rows_a_shard = batch.global_batch_size // batch.num_shards
    turn = np.tile(np.arange(rows_a_shard), batch.num_shards)
    first = emitted(position, batch.num_shards)[shards]
    return (first + turn) * batch.num_shards + shards


def emitted(position: int, num_shards: int) -> np.ndarray:
    """Rows that each shard has yielded before stream row `position`, int64 `[S]`."""
    return (position + num_shards - 1 - np.arange(num_shards)) // num_shards


def assign(batch: BatchRows, row_hosts: np.ndarray, position: int) -> list[HostRows]:
    """What each host loads, from `position` on.

    Args:
      batch: S and B.
      row_hosts: the host whose devices hold each row of a batch, int `[B]`, numbered
        from 0 without gaps; hosts that hold the same rows count as one.
      position: where in the stream the first batch begins.

    Raises:
      ConfigError: if no arrangement gives each shard to one host; the message says
        which numbers would fit.
    """
    num_hosts = int(row_hosts.max()) + 1
    if batch.arrangement is not Arrangement.STRIPED:
        assigned = _assign_in_place(batch, row_hosts, position, num_hosts)
        if assigned is not None:
            return assigned
    size, num_shards = batch.global_batch_size, batch.num_shards
    if size % num_hosts or num_shards % num_hosts:
        raise errors.ConfigError(
            f"{num_hosts} hosts cannot share {num_shards} logical shards in batches of"
            f" {size} rows: the hosts have to divide both; use a number of hosts that"
            f" divides {math.gcd(size, num_shards)}, or start a run with"
            f" num_logical_shards={suggest_num_shards([num_hosts], [size])}"
        )
    return [
        HostRows(
            rows=np.flatnonzero(batch.shards(position) % num_hosts == host),
            shards=np.arange(host, num_shards, num_hosts),
            in_place=False,
        )
        for host in range(num_hosts)
    ]


def suggest_num_shards(hosts: Sequence[int], batches: Sequence[int]) -> int:
    """The least S with which rows are in place at each of `hosts` and `batches`.

    Args:
      hosts: the numbers of hosts that a run may have.
      batches: the global batch sizes that it may have; a host count is only used with
        those that it divides.

    Raises:
      ConfigError: if a batch size is not divided by any of the hosts.
    """
    for size in batches:
        if all(size % num_hosts for num_hosts in hosts):
            raise errors.ConfigError(
                f"a batch of {size} rows is divided by none of the host counts"
                f" {sorted(hosts)}; choose a multiple of one of them"
            )
    least = math.lcm(*hosts)
    if all(size % least == 0 for size in batches):
        return least
    return math.lcm(*batches)


def _assign_in_place(
    batch: BatchRows, row_hosts: np.ndarray, position: int, num_hosts: int
) -> list[HostRows] | None:
    # A shard's owner by way of a row that it has; None if its rows are of several.
    size, num_shards = batch.global_batch_size, batch.num_shards
    shards = np.arange(num_shards)
    if batch.arrangement is Arrangement.BLOCKED:
        by_shard = row_hosts.reshape(num_shards, -1)
        owners = by_shard[:, 0]
        if (by_shard != owners[:, None]).any():
            return None
    else:
        owners = row_hosts[(shards - position) % size]
    return [
        HostRows(
            rows=np.flatnonzero(row_hosts == host),
            shards=np.flatnonzero(owners == host),
            in_place=True,
        )
        for host in range(num_hosts)
    ]
