"""Coverage: what of a step is lost with one host, slice, rack or zone, and what is not.

An item survives if holders outside of what fails have it too. Copies in persistent
storage survive whatever happens to hosts.

Glossary: items as in `holdings`, n rows (an item at a holder).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from elastic_ckpt.manifests.holdings import Holdings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Coverage:
    """What one kind of failure domain takes with it.

    Attributes:
      domain: the kind, such as `slice`.
      lost: by domain of that kind, ordered, the numbers of the items that are nowhere
        else, ascending, int64. Each domain of a holder in memory is there.
      num_survivors: items that survive the loss of any one of these domains.
    """

    domain: str
    lost: Mapping[str, np.ndarray]
    num_survivors: int


def coverage(holdings: Holdings, domain: str) -> Coverage:
    """What the loss of any one failure domain of a kind leaves of a step.

    Boxes are looked at one by one: one that others would cover together counts as lost.

    Args:
      holdings: of the step.
      domain: the kind. Holders that were not told theirs are in one together, as in
        placement, whose name is empty.
    """
    of_offer = [each.host.domains.get(domain, "") for each in holdings.offers]
    in_memory = [each.tier == "local" for each in holdings.offers]
    names = sorted({n for n, kept in zip(of_offer, in_memory, strict=True) if kept})
    numbers = {name: number for number, name in enumerate(names)}
    # Storage is a domain of its own, which is not lost.
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
