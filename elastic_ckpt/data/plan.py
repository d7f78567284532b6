"""Predicts, before a run, how numbers of shards, hosts and rows work together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.data import rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """The loading of batches of one size by a number of hosts.

    Attributes:
      num_hosts: the number of hosts, H.
      global_batch_size: the rows of a batch, B.
      arrangement: the arrangement of rows in a batch; depends only on B and the number
        of shards.
      loading_hosts: the number of hosts that load: H, or the largest number below that
        divides B.
      rows_identical: whether batches on H hosts equal those of one host row by row;
        false if H does not divide B, because rows then move between hosts.
      host_shards: the shards that each loading host runs.
      moved_rows: rows of a batch that are loaded on a host other than their own.
      made_rows: rows that all hosts make for a batch; more than B if several hosts run
        the same shard, and each discards the rows of other hosts.
    """

    num_hosts: int
    global_batch_size: int
    arrangement: str
    loading_hosts: int
    rows_identical: bool
    host_shards: tuple[tuple[int, ...], ...]
    moved_rows: int
    made_rows: int


def outlook(num_shards: int, num_hosts: int, global_batch_size: int) -> Outlook:
    """The loading of batches of B rows from S shards by H hosts in row order."""
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=global_batch_size)
    loading_hosts = next(
        h for h in range(num_hosts, 0, -1) if not global_batch_size % h
    )
    placement = rows.Placement.in_order(
        0, num_hosts=loading_hosts, global_batch_size=global_batch_size
    )
    assigned = rows.assign(batch, placement.row_hosts, 0)
    # The host of each row if H divides B; otherwise each host takes an equal share.
    belongs = np.arange(global_batch_size) * num_hosts // global_batch_size
    stays = sum(
        int((belongs[host.rows] == number).sum())
        for number, host in enumerate(assigned)
    )
    # The average number of rows that a batch takes from each shard.
    rows_a_shard = global_batch_size / num_shards
    return Outlook(
        num_hosts=num_hosts,
        global_batch_size=global_batch_size,
        arrangement=batch.arrangement.value,
        loading_hosts=loading_hosts,
        rows_identical=loading_hosts == num_hosts,
        host_shards=tuple(tuple(host.shards.tolist()) for host in assigned),
        moved_rows=global_batch_size - stays,
        made_rows=round(rows_a_shard * sum(host.shards.size for host in assigned)),
    )


def outlooks(
    num_shards: int, hosts: Sequence[int], batches: Sequence[int]
) -> list[Outlook]:
    """The outlook of each number of hosts with each batch size."""
    return [outlook(num_shards, h, size) for h in hosts for size in batches]
