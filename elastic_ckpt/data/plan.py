"""What a choice of shards, hosts and batch sizes comes to, before a run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.data import rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """How one number of hosts would load batches of one size.

    Attributes:
      num_hosts: H.
      global_batch_size: B.
      arrangement: how rows lie in a batch; it depends on S and B alone.
      loading_hosts: the hosts that would load, H or the most that divide B.
      rows_identical: whether H hosts have batches that are row for row those of one
        host; false if H does not divide B, and rows have to be handed on.
      host_shards: the shards that each loading host runs.
      moved_rows: rows of a batch that are loaded on another host than they belong to.
      made_rows: rows that all hosts make for a batch; more than B if hosts run the same
        shards, and each discards what is another's.
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
    """How H hosts, in row order, would load batches of B rows from S shards."""
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=global_batch_size)
    loading_hosts = next(
        h for h in range(num_hosts, 0, -1) if not global_batch_size % h
    )
    placement = rows.Placement.in_order(
        0, num_hosts=loading_hosts, global_batch_size=global_batch_size
    )
    assigned = rows.assign(batch, placement.row_hosts, 0)
    # Where a row would have to be, if H divides B; else each host takes an equal share.
    belongs = np.arange(global_batch_size) * num_hosts // global_batch_size
    stays = sum(
        int((belongs[host.rows] == number).sum())
        for number, host in enumerate(assigned)
    )
    # How often a batch takes a row of each shard, on average.
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
