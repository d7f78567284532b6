"""The parts that a decision over all hosts gives to each of them.

One host decides from the table of all parts, and sends each host the rows that concern
it: what it takes or reads, at the holders to ask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from elastic_ckpt.core import columns
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.owners import Placement
from elastic_ckpt.steps.part_table import ALL_HOSTS, HeldFile, PartTable
from elastic_ckpt.steps.read_plan import ReadPlan

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
    first = holdings.first_row
    copy, within = columns.runs(first[placed.item + 1] - first[placed.item])
    row = first[placed.item][copy] + within
    sends = holdings.host_of_rows(hosts)[row] == placed.source[copy]
    others = ~sends & (within <= _OTHERS)
    target = placed.target
    return (
        _given(table, holdings, row[sends], target[copy[sends]]),
        _given(table, holdings, row[others], target[copy[others]]),
    )


def of_uploads(
    table: PartTable, holdings: Holdings, hosts: Sequence[Host]
) -> tuple[PartTable, PartTable]:
    """The parts that each host uploads: where it reads them, and a few other holders.

    After a change of hosts, parts of a step may be in the memory of idle machines
    alone: all hosts share those.

    Args:
      table: of all parts.
      holdings: of `table.offers()`.
      hosts: of the world, by number.
    """
    everyone = tuple(range(len(hosts)))
    sets = [held or everyone for held in holdings.holder_sets(hosts)]
    target = np.array(owners.shares(sets, holdings.stored_bytes), np.int64)
    first = holdings.first_row
    part, within = columns.runs(np.diff(first))
    row = first[:-1][part] + within
    host = holdings.host_of_rows(hosts)
    # Its own part, or else the first of them.
    rank = np.where(host[row] == target[part], -1, within)
    order = np.lexsort([rank, part])
    row, part = row[order], part[order]
    others = (within > 0) & (within <= _OTHERS)
    return (
        _given(table, holdings, row[within == 0], target),
        _given(table, holdings, row[others], target[part[others]]),
    )


def of_reads(
    table: PartTable, plan: ReadPlan, components: Collection[str]
) -> PartTable:
    """The parts that each reader of a plan reads, and all files of some components.

    Each part is at its nearest holders, in persistent storage only if in no other tier.

    Args:
      table: of all parts.
      plan: for readers that are numbered as the hosts of the world; its holdings are
        those of `table.offers()`.
      components: that all readers read.
    """
    holdings = plan.holdings
    piece, within = columns.runs(np.diff(plan.first_choice))
    near = within <= _OTHERS
    row, piece = plan.choice[near], piece[near]
    target = plan.wanted.reader[plan.of_wanted[piece]].astype(np.int64)
    # Pieces that are cut out of one box are one part.
    pairs = columns.distinct(target * np.int64(len(holdings.holder)) + row)
    target, row = np.divmod(pairs, np.int64(max(1, len(holdings.holder))))
    is_wanted = np.array(
        [file.component in components for file in holdings.files], bool
    )
    first = holdings.first_row[len(holdings.leaf)]
    file = holdings.item[first:] - len(holdings.leaf)
    files = first + np.flatnonzero(is_wanted[file])
    everyone = np.full(len(files), ALL_HOSTS, np.int64)
    is_stored = np.array([offer.tier != "local" for offer in holdings.offers], bool)
    rows, targets = np.append(row, files), np.append(target, everyone)
    item = holdings.item
    in_ram = np.zeros(holdings.num_items, bool)
    in_ram[item[~is_stored[holdings.holder]]] = True
    needed = ~(is_stored[holdings.holder[rows]] & in_ram[item[rows]])
    return _given(table, holdings, rows[needed], targets[needed])


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
