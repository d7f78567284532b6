"""Recovery: a host reads what it needs from the nearest holders, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from elastic_ckpt.checkpoint.host import trees, verified_read
from elastic_ckpt.steps import read_plan
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.find import FoundStep

# Of boxes that are read at a time, and moved to devices at a time.
_WINDOW_BYTES = 2**28


def read_leaves(
    step_found: FoundStep,
    wanted: Sequence[trees.WantedLeaf],
    reader: verified_read.VerifiedReader,
    *,
    host: Host,
    domain: str,
) -> dict[str, list[Any]]:
    """Reads the requested boxes of a host, verified, and places them.

    They are read in windows, of which one is moved to the devices while the next is
    read: what is in host memory at a time is bounded, but for leaves that stay there.

    Args:
      step_found: the step.
      wanted: the leaves that this host needs.
      reader: of the step.
      host: this one.
      domain: the kind of failure domain inside of which a peer is close.

    Returns:
      By the path of each leaf, its placed boxes.

    Raises:
      CheckpointError: if no good copy of a part is left.
    """
    plan = planned(step_found.table, wanted, host=host, domain=domain)
    of_boxes = [(leaf, number) for leaf in wanted for number in range(len(leaf.boxes))]
    saved = {leaf.path: leaf for leaf in step_found.table.contents.leaves}
    sizes = [
        saved[leaf.path].num_bytes(leaf.boxes[number]) for leaf, number in of_boxes
    ]
    windows = _windows([leaf.is_moved for leaf, _ in of_boxes], sizes)
    read = verified_read.read_windows(plan, reader, windows)
    placed: dict[str, list[Any]] = {leaf.path: [] for leaf in wanted}
    arrived: list[Any] = []
    for window, values in zip(windows, read, strict=True):
        # A device may still receive the window before.
        jax.block_until_ready(arrived)
        arrived = []
        for (leaf, number), each in zip(
            of_boxes[window.start : window.stop], values, strict=True
        ):
            part = leaf.place(number, each)
            placed[leaf.path].append(part)
            if leaf.is_moved:
                arrived.append(part)
    return placed


def _windows(is_moved: Sequence[bool], sizes: Sequence[int]) -> list[range]:
    # What stays in host memory is bounded by nothing: it ends no window.
    windows, first, num_bytes = [], 0, 0
    for number, (moved, size) in enumerate(zip(is_moved, sizes, strict=True)):
        if moved and num_bytes and num_bytes + size > _WINDOW_BYTES:
            windows.append(range(first, number))
            first, num_bytes = number, 0
        num_bytes += size if moved else 0
    return [*windows, range(first, len(sizes))]


def planned(
    table: StepTable,
    wanted: Sequence[trees.WantedLeaf],
    *,
    host: Host,
    domain: str,
) -> read_plan.ReadPlan:
    """Plans the reads of a host; its boxes are those of the leaves in their order.

    Args:
      table: of the step.
      wanted: the leaves that this host needs.
      host: this one.
      domain: the kind of failure domain inside of which a peer is close.

    Raises:
      CheckpointError: if the step is not complete, or lacks what is wanted.
    """
    listed = [(leaf.path, box) for leaf in wanted for box in leaf.boxes]
    boxes = read_plan.Wanted.from_boxes(listed, contents=table.contents)
    return read_plan.plan(table, host, boxes, domain=domain)
