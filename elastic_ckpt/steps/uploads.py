"""Uploads: which host writes which item to the persistent tier, each one once.

The result depends on the manifests alone, whatever their order. Items that only one
host has are uploaded by it; the others are assigned to the least loaded of their
holders, the most constrained and then the largest first. That is greedy list
scheduling: where all hosts hold all, no host has more than the mean and the largest
item (Graham 1969), and for any distribution of the holders, no host has more than
`ceil(log2 hosts) + 1` times what the best assignment gives its most loaded host (Azar,
Naor and Rom 1995, "The competitiveness of on-line assignments",
doi:10.1006/jagm.1995.1008).

Glossary: items as in `holdings`, i of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Uploads:
    """The host that uploads each item.

    Attributes:
      hosts: ordered by id.
      host: the number in `hosts` of the one that uploads each item, int32 `[i]`; -1 of
        items that none of them has.
      row: of each item, the row of the holdings for that host, int64 `[i]`; -1
        likewise.
    """

    hosts: tuple[Host, ...]
    host: np.ndarray
    row: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """The items that no host can upload, int64."""
        return np.flatnonzero(self.host < 0)

    def items_of(self, host_id: str) -> np.ndarray:
        """Returns the items that a host uploads, ascending, int64."""
        numbers = [n for n, host in enumerate(self.hosts) if host.id == host_id]
        return np.flatnonzero(np.isin(self.host, numbers))


def uploads(holdings: Holdings, hosts: Sequence[Host]) -> Uploads:
    """Assigns each box and each file of a component to one host that has it in memory.

    Args:
      holdings: of one step; what is held outside of the local tiers does not count.
      hosts: that take part. Holders that are not among them do not count.
    """
    ordered = tuple(sorted(hosts, key=lambda host: host.id))
    row, host = _rows(holdings, ordered)
    item = holdings.item[row]
    num_items = holdings.num_items
    count = np.bincount(item, minlength=num_items)
    first = np.concatenate([[0], np.cumsum(count)])
    # The index of the chosen row among these.
    chosen = np.full(num_items, -1)
    alone = np.flatnonzero(count == 1)
    chosen[alone] = first[alone]
    sizes = holdings.stored_bytes
    load = np.bincount(host[chosen[alone]], sizes[alone], len(ordered)).tolist()
    several = np.flatnonzero(count > 1)
    order = several[np.lexsort([several, -sizes[several], count[several]])]
    of_row = host.tolist()
    # One pass in Python: each choice depends on all before it. 1e6 items with three
    # holders each take a second and a half.
    for each, begin, end, size in zip(
        order.tolist(),
        first[order].tolist(),
        first[order + 1].tolist(),
        sizes[order].tolist(),
        strict=True,
    ):
        least = min(of_row[begin:end], key=load.__getitem__)
        load[least] += size
        chosen[each] = begin + of_row[begin:end].index(least)
    there = chosen >= 0
    uploader = np.full(num_items, -1, np.int32)
    uploader[there] = host[chosen[there]]
    rows = np.full(num_items, -1)
    rows[there] = row[chosen[there]]
    return Uploads(hosts=ordered, host=uploader, row=rows)


def of_all_items(holdings: Holdings, hosts: Sequence[Host]) -> Uploads:
    """As `uploads`, and items that no host of the world has are dealt to all hosts.

    After a change of hosts, parts of a step may be in the memory of idle machines
    alone; the chosen host reads them from there.

    Args:
      holdings: of one step, in the local tiers alone.
      hosts: that take part.
    """
    dealt = uploads(holdings, hosts)
    missing = dealt.missing
    if not (len(missing) and hosts):
        return dealt
    there, sizes = dealt.host >= 0, holdings.stored_bytes
    load = np.bincount(dealt.host[there], sizes[there], len(hosts))
    host, row = dealt.host.copy(), dealt.row.copy()
    for item in missing.tolist():
        host[item], row[item] = load.argmin(), holdings.first_row[item]
        load[host[item]] += sizes[item]
    return Uploads(hosts=dealt.hosts, host=host, row=row)


def batches(
    items: np.ndarray, sizes: np.ndarray, *, most_bytes: int, most_items: int
) -> list[np.ndarray]:
    """Cuts items into runs that are written together, each as large as allowed.

    Args:
      items: in their order.
      sizes: of each of them in bytes, int64 `[i]`.
      most_bytes: of a run; a larger item is a separate run.
      most_items: of a run, at least 1.
    """
    cuts = []
    begin, num_bytes = 0, 0
    for place, size in enumerate(sizes.tolist()):
        full = num_bytes + size > most_bytes or place - begin == most_items
        if place > begin and full:
            cuts.append(place)
            begin, num_bytes = place, 0
        num_bytes += size
    return np.split(items, cuts) if len(items) else []


def _rows(holdings: Holdings, hosts: tuple[Host, ...]) -> tuple[np.ndarray, np.ndarray]:
    # The rows of the holdings at the hosts of the world, and the number of each host.
    host = holdings.host_of_rows(hosts)
    row = np.flatnonzero(host >= 0)
    # Each host lists its own offers first, so rows are sorted: all have to choose the
    # same.
    row = row[np.lexsort([host[row], holdings.item[row]])]
    return row, host[row]
