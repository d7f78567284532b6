"""Values that are kept from one step to the next, so that only changed ones are read.

A wanted box is made of saved boxes, whose digests are in the manifests. While these
digests stay the same, so do the values, and nothing is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.checkpoint.host import recovery, trees, verified_read
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.find import FoundStep

# The dtype of a leaf, and the saved boxes, with their digests, that make a wanted one.
_Origin = tuple[str, tuple[tuple[boxes.Box, bytes], ...]]
_DOMAIN = "slice"


class KeptValues:
    """The values of the boxes that one process has read, each as of the newest read.

    Args:
      reader: the process, which need not be a host of the run.
    """

    def __init__(self, reader: Host) -> None:
        self._reader = reader
        self._kept: dict[tuple[str, boxes.Box], tuple[_Origin, np.ndarray]] = {}

    def read(
        self, step_found: FoundStep, wanted: Sequence[trees.WantedLeaf]
    ) -> dict[str, list[np.ndarray]]:
        """The values of wanted boxes of a step, verified, by the path of their leaf.

        Those that have changed since they were read last are read.

        Returns:
          Arrays that must not be written to: they are those of the next read, too.

        Raises:
          CheckpointError: if no good copy of a part is left.
        """
        plan = recovery.planned(
            step_found.table, wanted, host=self._reader, domain=_DOMAIN
        )
        keys = [(leaf.path, box) for leaf in wanted for box in leaf.boxes]
        origins = dict(zip(keys, _origins(plan), strict=True))
        nothing = (None, None)
        changed = [
            dataclasses.replace(
                leaf,
                boxes=tuple(those),
                place=lambda _, values: values,
                join=list,
                is_moved=False,
            )
            for leaf in wanted
            if (
                those := [
                    box
                    for box in leaf.boxes
                    if self._kept.get((leaf.path, box), nothing)[0]
                    != origins[leaf.path, box]
                ]
            )
        ]
        read = recovery.read_leaves(
            step_found,
            changed,
            verified_read.VerifiedReader(step_found),
            host=self._reader,
            domain=_DOMAIN,
        )
        for leaf in changed:
            for box, values in zip(leaf.boxes, read[leaf.path], strict=True):
                values.flags.writeable = False
                self._kept[leaf.path, box] = origins[leaf.path, box], values
        return {
            leaf.path: [self._kept[leaf.path, box][1] for box in leaf.boxes]
            for leaf in wanted
        }


def _origins(plan: read_plan.ReadPlan) -> list[_Origin]:
    # Of each wanted box, in their order.
    table = plan.table
    made_of: list[list[tuple[boxes.Box, bytes]]] = [[] for _ in plan.wanted.leaf]
    pairs = zip(plan.of_wanted.tolist(), plan.item.tolist(), strict=True)
    for of_wanted, item in pairs:
        made_of[of_wanted].append((table.box(item), table.digest(item)))
    dtypes = [leaf.dtype for leaf in table.contents.leaves]
    return [
        (dtypes[leaf], tuple(sorted(each)))
        for leaf, each in zip(plan.wanted.leaf.tolist(), made_of, strict=True)
    ]
