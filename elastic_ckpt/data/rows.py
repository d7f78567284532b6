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
* `striped` otherwise: in the order of the stream, but if H divides S, row `r` is loaded
  by host `r % H`, which owns every H-th shard. Each batch has the right rows; to stand
  in their places they are exchanged between the hosts' devices (`exchanged`).

Hosts that fit in none of these ways run each shard of which they hold a row, and
discard the rows that are another host's: every H that divides B works, at a price.

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
      shards: the shards that the host runs, ascending; other rows of theirs than `rows`
        are discarded.
      writes: those of the shards whose cursors the host saves; each shard has one such
        host.
      in_place: whether `rows` are those that the host's devices hold.
    """

    rows: np.ndarray
    shards: np.ndarray
    writes: np.ndarray
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
    """
    num_hosts = int(row_hosts.max()) + 1
    rows = np.argsort(row_hosts, kind="stable")
    in_place = exchanged(batch, row_hosts) is None
    if in_place:
        hosts, shards, writes = _in_place(batch, row_hosts, position)
    else:
        rows = _every_nth(rows.size, num_hosts)
        shards = _every_nth(batch.num_shards, num_hosts)
        shards = np.sort((shards.reshape(num_hosts, -1) + position) % batch.num_shards)
        shards = shards.reshape(-1)
        hosts = np.repeat(np.arange(num_hosts), batch.num_shards // num_hosts)
        writes = np.ones(batch.num_shards, bool)
    ends = np.arange(1, num_hosts)
    return [
        HostRows(rows=of_host, shards=runs, writes=saves, in_place=in_place)
        for of_host, runs, saves in zip(
            np.split(rows, ends * (rows.size // num_hosts)),
            np.split(shards, np.searchsorted(hosts, ends)),
            np.split(shards[writes], np.searchsorted(hosts[writes], ends)),
            strict=True,
        )
    ]


def exchanged(batch: BatchRows, row_hosts: np.ndarray) -> np.ndarray | None:
    """Where each row of a batch stands in what the hosts load, int64 `[B]`.

    None if the hosts load the rows that their devices hold. Takes the arguments of
    `assign`; the same at every position.
    """
    num_hosts = int(row_hosts.max()) + 1
    fits = batch.num_shards % num_hosts == 0
    if batch.arrangement is not Arrangement.STRIPED or not fits or num_hosts == 1:
        return None
    # Host h has loaded the rows h, h + H, h + 2H, ... and holds these places.
    places = np.argsort(row_hosts, kind="stable").reshape(num_hosts, -1)
    return places.T.reshape(-1)


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


def _in_place(
    batch: BatchRows, row_hosts: np.ndarray, position: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Every pair of a host and a shard that it runs, sorted, as two arrays; and of each
    # pair, whether the host is the first that runs the shard.
    #
    # The next batch begins B rows later. Unless blocks keep their places, a row then
    # comes from another shard, and in the end from every gcd(B, S)-th.
    num_shards = batch.num_shards
    stride = math.gcd(batch.global_batch_size, num_shards)
    shards = batch.shards(position)
    classes = np.unique(row_hosts * stride + shards % stride)
    later = np.arange(0, num_shards, stride)
    of_class = classes // stride * num_shards + classes % stride
    pairs = np.sort((of_class[:, None] + later).reshape(-1))
    hosts, run = pairs // num_shards, pairs % num_shards
    first = np.full(num_shards, row_hosts.size)
    np.minimum.at(first, run, hosts)
    return hosts, run, first[run] == hosts


def _every_nth(count: int, num_hosts: int) -> np.ndarray:
    # Host by host, what is the host's number modulo H.
    return np.arange(count).reshape(-1, num_hosts).T.reshape(-1)
