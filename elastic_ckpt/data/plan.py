"""Predicts, before a run, how numbers of shards, hosts and rows work together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
        can share out the shards and the rows evenly.
      host_shards: the shards that each loading host runs.
      host_rows: the rows of a batch that each loading host makes.
      moved_rows: rows of a batch that are loaded on a host other than their own, and
        handed on over the devices' network.
      moved_bytes: the bytes of these rows; None if those of a row are not known.
    """

    num_hosts: int
    global_batch_size: int
    arrangement: str
    loading_hosts: int
    host_shards: tuple[tuple[int, ...], ...]
    host_rows: int
    moved_rows: int
    moved_bytes: int | None


def outlook(
    num_shards: int,
    num_hosts: int,
    global_batch_size: int,
    *,
    row_bytes: int | None = None,
) -> Outlook:
    """The loading of batches of B rows from S shards by H hosts in row order.

    If H does not divide B, hosts hold equal shares, or nearly. JAX has such batches
    only on a mesh that does not shard rows over all hosts.
    """
    batch = rows.BatchRows(num_shards=num_shards, global_batch_size=global_batch_size)
    row_hosts = rows.shares(num_hosts, global_batch_size)
    loaders = rows.loaders(batch, row_hosts)
    assigned = rows.assign(batch, loaders, 0)
    moved = int((loaders != row_hosts).sum())
    return Outlook(
        num_hosts=num_hosts,
        global_batch_size=global_batch_size,
        arrangement=batch.arrangement.value,
        loading_hosts=len(assigned),
        host_shards=tuple(tuple(host.shards.tolist()) for host in assigned),
        host_rows=len(assigned[0].rows),
        moved_rows=moved,
        moved_bytes=None if row_bytes is None else moved * row_bytes,
    )


def outlooks(
    num_shards: int,
    hosts: Sequence[int],
    batches: Sequence[int],
    *,
    row_bytes: int | None = None,
) -> list[Outlook]:
    """The outlook of each number of hosts with each batch size."""
    return [
        outlook(num_shards, h, size, row_bytes=row_bytes)
        for h in hosts
        for size in batches
    ]
