"""Coverage: which items of a step survive the loss of one host, slice, rack or zone.

An item survives if it also has a holder outside of the failure domain that is lost.
Copies in persistent storage always survive the loss of hosts.

Glossary: items as in `holdings`, n rows (an item at a holder).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from elastic_ckpt.steps.holdings import Holdings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Coverage:
    """The items that are lost with each failure domain of one kind.

    Attributes:
      domain: the kind, such as `slice`.
      lost: by domain of that kind, ordered, the numbers of the items that no other
        domain holds, ascending, int64. Each domain of a holder in memory has an entry.
      num_survivors: items that survive the loss of any one of these domains.
    """

    domain: str
    lost: Mapping[str, np.ndarray]
    num_survivors: int


def coverage(holdings: Holdings, domain: str) -> Coverage:
    """Computes which items are lost with each failure domain of a kind.

    Boxes are examined one by one: a box counts as lost even if other boxes cover it
    together.

    Args:
      holdings: of the step.
      domain: the kind. Holders without a name of that kind are together in one domain
        with an empty name, as in placement.
    """
    of_offer = [each.host.domains.get(domain, "") for each in holdings.offers]
    in_memory = [each.tier == "local" for each in holdings.offers]
    names = sorted({n for n, kept in zip(of_offer, in_memory, strict=True) if kept})
    numbers = {name: number for number, name in enumerate(names)}
    # Storage is a separate domain, which is not lost.
    outside = len(names)
    number = np.array(
        [
            numbers[name] if kept else outside
            for name, kept in zip(of_offer, in_memory, strict=True)
        ]
    )
    of_row = number[holdings.holder]
    first = holdings.first_row[:-1]
    # An item has a row at least, so no run that is reduced is empty.
    least = np.minimum.reduceat(of_row, first) if len(first) else of_row
    most = np.maximum.reduceat(of_row, first) if len(first) else of_row
    alone = np.flatnonzero((least == most) & (least < outside))
    order = alone[np.argsort(least[alone], kind="stable")]
    ends = np.searchsorted(least[order], np.arange(len(names) + 1))
    return Coverage(
        domain=domain,
        lost={
            name: order[ends[place] : ends[place + 1]]
            for place, name in enumerate(names)
        },
        num_survivors=holdings.num_items - len(alone),
    )
