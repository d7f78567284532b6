"""What a choice of shards, hosts and batch sizes comes to, before a run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """How one number of hosts would load batches of one size.

    Attributes:
      num_hosts: H.
      global_batch_size: B.
      arrangement: how rows lie in a batch; it depends on S and B alone.
      loading_hosts: the hosts that would load, H or the most that can; 0 if none can.
      rows_identical: whether these load the rows that stand in their places, so that
        every batch is row for row that of one host.
      host_shards: the shards of each loading host.
      moved_rows: rows of a batch that are loaded on another host than they belong to.
    """

    num_hosts: int
    global_batch_size: int
    arrangement: str
    loading_hosts: int
    rows_identical: bool
    host_shards: tuple[tuple[int, ...], ...]
    moved_rows: int


def outlook(num_shards: int, num_hosts: int, global_batch_size: int) -> Outlook:
    """How H hosts, in row order, would load batches of B rows from S shards.

    If H does not fit, the most hosts below it that do would load, and hand rows on.
    """
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=global_batch_size)
    for loading_hosts in range(num_hosts, 0, -1):
        assigned = _assigned(batch, loading_hosts)
        if assigned is not None:
            break
    else:
        loading_hosts, assigned = 0, []
    # Where a row would have to be, if H divides B; else each host takes an equal share.
    belongs = np.arange(global_batch_size) * num_hosts // global_batch_size
    stays = sum(
        int((belongs[host.rows] == number).sum())
        for number, host in enumerate(assigned)
    )
    return Outlook(
        num_hosts=num_hosts,
        global_batch_size=global_batch_size,
        arrangement=batch.arrangement.value,
        loading_hosts=loading_hosts,
        rows_identical=bool(assigned) and all(host.in_place for host in assigned),
        host_shards=tuple(tuple(host.shards.tolist()) for host in assigned),
        moved_rows=global_batch_size - stays,
    )


def outlooks(
    num_shards: int, hosts: Sequence[int], batches: Sequence[int]
) -> list[Outlook]:
    """The outlook of each number of hosts with each batch size."""
    return [outlook(num_shards, h, size) for h in hosts for size in batches]


def _assigned(batch: rows.BatchRows, num_hosts: int) -> list[rows.HostRows] | None:
    try:
        placement = rows.Placement.in_order(
            0, num_hosts=num_hosts, global_batch_size=batch.global_batch_size
        )
        return rows.assign(batch, placement.row_hosts, 0)
    except errors.ConfigError:
        return None
