"""The parts that a decision over all hosts gives to each of them.

One host decides from the table of all parts, and sends each host the rows that concern
it: what it takes or reads, at the holders to ask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import columns
from elastic_ckpt.manifests.holdings import Holdings
from elastic_ckpt.manifests.manifest import Host
from elastic_ckpt.manifests.part_table import HeldFile, PartTable
from elastic_ckpt.manifests.placement import Placement
from elastic_ckpt.manifests.uploads import Uploads

# Holders of an item besides its sender, which are asked if that one fails.
_OTHERS = 2


def of_copies(
    table: PartTable, holdings: Holdings, placed: Placement, hosts: Sequence[Host]
) -> tuple[PartTable, PartTable]:
    """The parts that each host copies: at their senders, and at a few other holders.

    Args:
      table: of all parts.
      holdings: of `table.offers()`.
      placed: the copies.
      hosts: of the world, by number.
    """
    numbers = {host.id: number for number, host in enumerate(hosts)}
    number_of = np.array([numbers[host.id] for host in placed.hosts], np.int64)
    first = holdings.first_row
    copy, within = columns.runs(first[placed.item + 1] - first[placed.item])
    row = first[placed.item][copy] + within
    sends = holdings.host_of_rows(placed.hosts)[row] == placed.source[copy]
    others = ~sends & (within <= _OTHERS)
    target = number_of[placed.target]
    return (
        _given(table, holdings, row[sends], target[copy[sends]]),
        _given(table, holdings, row[others], target[copy[others]]),
    )


def of_uploads(
    table: PartTable, holdings: Holdings, shared: Uploads, hosts: Sequence[Host]
) -> tuple[PartTable, PartTable]:
    """The parts that each host uploads: where it reads them, and a few other holders.

    Args:
      table: of all parts.
      holdings: of `table.offers()`.
      shared: which host uploads which item.
      hosts: of the world, by number.
    """
    numbers = {host.id: number for number, host in enumerate(hosts)}
    number_of = np.array([numbers[host.id] for host in shared.hosts], np.int64)
    item = np.flatnonzero(shared.host >= 0)
    first = holdings.first_row
    part, within = columns.runs(first[item + 1] - first[item])
    row = first[item][part] + within
    others = (row != shared.row[item][part]) & (within <= _OTHERS)
    target = number_of[shared.host[item]]
    return (
        _given(table, holdings, shared.row[item], target),
        _given(table, holdings, row[others], target[part[others]]),
    )


def _given(
    table: PartTable, holdings: Holdings, row: np.ndarray, target: np.ndarray
) -> PartTable:
    # The parts of some rows of the holdings, each for one host.
    is_box = row < holdings.first_row[len(holdings.leaf)]
    boxes, files = row[is_box], row[~is_box]
    rows = table.rows_of(holdings.holder[boxes], holdings.number[boxes])
    held = []
    for each, host in zip(files.tolist(), target[~is_box].tolist(), strict=True):
        holder = int(holdings.holder[each])
        of_holder = holdings.offers[holder].manifest.component_files
        held.append(HeldFile(holder, host, of_holder[holdings.number[each]]))
    return table.take(rows, held, target=target[is_box].astype(np.int32))
