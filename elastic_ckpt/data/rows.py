"""The assignment of rows and shards to hosts, as pure functions of numbers.

The rows of a run form one stream. Stream row `g` is row `g // S` of logical shard
`g % S`, for a fixed number S of shards. A batch of B rows at position `p` is the stream
from `p` to `p + B`. A position is therefore one number, which determines the position
of each shard. It depends neither on the batch size nor on the number of hosts, so both
may change at any step.

Inside a batch the rows are arranged so that each shard can stay on one host:

* `blocked`, if S divides B (B = kS): sorted by shard, so rows `[sk, (s+1)k)` are those
  of shard `s`. A host that holds a whole number of such runs owns these shards.
* `windowed`, if B divides S: in the order of the stream. Row `r` comes from the shards
  that are `r + p` modulo B, at each step until B changes. The host with row `r` owns
  these shards.
* `striped` otherwise: in the order of the stream. The shards that are equal modulo
  gcd(B, S) take turns in the same rows.

A host runs each shard of which it holds a row, and discards the rows of others.

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
    """The arrangement of the rows in a batch; see the module's docstring."""

    BLOCKED = "blocked"
    WINDOWED = "windowed"
    STRIPED = "striped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRows:
    """The rows of the batches of one size.

    Attributes:
      num_shards: S, fixed for the whole run.
      global_batch_size: B, until it changes.
    """

    num_shards: int
    global_batch_size: int

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of rows in a batch; depends only on B and S."""
        if self.global_batch_size % self.num_shards == 0:
            return Arrangement.BLOCKED
        if self.num_shards % self.global_batch_size == 0:
            return Arrangement.WINDOWED
        return Arrangement.STRIPED

    def shards(self, position: int) -> np.ndarray:
        """The shard of each row of the batch at `position`, int64 `[B]`.

        Rows of the same shard are in the order in which the shard yields them.
        """
        rows = np.arange(self.global_batch_size)
        if self.arrangement is Arrangement.BLOCKED:
            return rows // (self.global_batch_size // self.num_shards)
        return (position + rows) % self.num_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of the rows of a batch on hosts, and the current host.

    Attributes:
      row_hosts: the host that loads each row of a batch, int `[B]`, numbered from 0
        without gaps; hosts that hold the same rows count as one.
      host: the number of the current host.
      turns: of how many batches in succession the host takes one; the others are those
        of other processes with the same rows, such as workers of a PyTorch loader.
      skips: the number of batches that it skips before its first.
    """

    row_hosts: np.ndarray
    host: int
    turns: int = 1
    skips: int = 0

    @classmethod
    def in_order(
        cls, host: int, *, num_hosts: int, global_batch_size: int
    ) -> Placement:
        """The placement in which host h of H holds the h-th part of the rows."""
        if global_batch_size % num_hosts:
            raise errors.ConfigError(
                f"a global batch of {global_batch_size} rows cannot be divided evenly"
                f" among {num_hosts} hosts; choose a multiple of {num_hosts}"
            )
        row_hosts = np.repeat(np.arange(num_hosts), global_batch_size // num_hosts)
        return cls(row_hosts=row_hosts, host=host)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return int(self.row_hosts.max()) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows:
    """The rows of every batch that one host loads, until B or the hosts change.

    Attributes:
      rows: the rows of a batch that the host loads, ascending, int64.
      shards: the shards that the host runs, ascending; it discards their rows that are
        not in `rows`.
      writes: the shards whose cursors the host saves; each shard has one such host.
    """

    rows: np.ndarray
    shards: np.ndarray
    writes: np.ndarray


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
    """The number of rows of each shard before stream row `position`, int64 `[S]`."""
    return (position + num_shards - 1 - np.arange(num_shards)) // num_shards


def assign(batch: BatchRows, row_hosts: np.ndarray, position: int) -> list[HostRows]:
    """The rows that each host loads, from `position` on.

    Args:
      batch: S and B.
      row_hosts: the host that loads each row of a batch, int `[B]`, numbered from 0
        without gaps; hosts that hold the same rows count as one.
      position: the position in the stream of the first batch.
    """
    # Every pair of a host and a shard that it runs, sorted, as two arrays; and for each
    # pair, whether the host is the first that runs the shard.
    #
    # The next batch begins B rows later. Unless the arrangement is blocked, a row then
    # comes from another shard, and over time from every gcd(B, S)-th shard.
    num_shards = batch.num_shards
    stride = math.gcd(batch.global_batch_size, num_shards)
    classes = _classes(batch, row_hosts, position)
    later = np.arange(0, num_shards, stride)
    first_pairs = classes // stride * num_shards + classes % stride
    pairs = np.sort((first_pairs[:, None] + later).reshape(-1))
    hosts, shards = pairs // num_shards, pairs % num_shards
    first = np.full(num_shards, row_hosts.size)
    np.minimum.at(first, shards, hosts)
    writes = first[shards] == hosts
    rows = np.argsort(row_hosts, kind="stable")
    ends = np.arange(1, int(row_hosts.max()) + 1)
    return [
        HostRows(rows=loads, shards=runs, writes=saves)
        for loads, runs, saves in zip(
            np.split(rows, np.searchsorted(row_hosts[rows], ends)),
            np.split(shards, np.searchsorted(hosts, ends)),
            np.split(shards[writes], np.searchsorted(hosts[writes], ends)),
            strict=True,
        )
    ]


def _classes(batch: BatchRows, row_hosts: np.ndarray, position: int) -> np.ndarray:
    # Every pair of a host and the residue, modulo gcd(B, S), of a shard that it runs.
    stride = math.gcd(batch.global_batch_size, batch.num_shards)
    return np.unique(row_hosts * stride + batch.shards(position) % stride)


def taken(batch: BatchRows, placement: Placement, position: int) -> HostRows:
    """The rows that the current host loads from the batches that it takes.

    Args:
      batch: S and B.
      placement: the host, and which batches it takes.
      position: the position in the stream, before any batch is skipped.
    """
    loads = assign(batch, placement.row_hosts, position)[placement.host]
    if placement.turns == 1:
        return loads
    first = position + placement.skips * batch.global_batch_size
    shards = batch.shards(first)[loads.rows]
    if batch.arrangement is not Arrangement.BLOCKED:
        # The next batch that it takes begins `turns * B` rows later.
        stride = math.gcd(placement.turns * batch.global_batch_size, batch.num_shards)
        later = np.arange(0, batch.num_shards, stride)
        shards = (np.unique(shards % stride)[:, None] + later).reshape(-1)
    shards = np.unique(shards)
    return HostRows(rows=loads.rows, shards=shards, writes=shards)


def suggest_num_shards(
    hosts: Sequence[int], batches: Sequence[int], loader_workers: Sequence[int] = (1,)
) -> int:
    """The smallest number of logical shards that suits some hosts and batches.

    With it, each host loads the rows that its own devices hold, and none has to be
    exchanged. No shard is run by two workers of a PyTorch loader.

    Args:
      hosts: the numbers of hosts that a run may have.
      batches: the global batch sizes that it may have; a number of hosts is only used
        with the sizes that it divides.
      loader_workers: the numbers of workers that PyTorch's loader of each rank may
        have, with `ec.data.TorchDataset`.

    Returns:
      S, for `ec.data.sharded` or `num_logical_shards`.

    Raises:
      ConfigError: if no number of hosts divides a batch size.
    """
    for size in batches:
        if all(size % num_hosts for num_hosts in hosts):
            raise errors.ConfigError(
                f"none of the host counts {sorted(hosts)} divides a batch of {size}"
                " rows; choose a multiple of one of them"
            )
    if any(number > 1 for number in loader_workers):
        # Workers take whole batches in turn, so these have to come from other shards.
        return math.lcm(*(b * max(w, 1) for b in batches for w in loader_workers))
    least = math.lcm(*hosts)
    if all(size % least == 0 for size in batches):
        return least
    return math.lcm(*batches)
