"""Recovery: a host reads from the nearest holders, and repairs bad copies."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees, verified_read
from elastic_ckpt.checkpoint.host.answers import BadCopyReport
from elastic_ckpt.core import errors
from elastic_ckpt.steps import layout, read_plan, search
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Contents, Host
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram import local

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
      CheckpointError: if no good copy of a part is left, or `step_found` lacks one.
    """
    plan = planned(step_found.step, wanted, host=host, domain=domain)
    of_boxes = [(leaf, number) for leaf in wanted for number in range(len(leaf.boxes))]
    contents = step_found.step.holdings.contents
    dtypes = {leaf.path: leaf.dtype for leaf in contents.leaves}
    sizes = [
        layout.num_bytes(leaf.boxes[number], dtypes[contents.listed_path(leaf.path)])
        for leaf, number in of_boxes
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
    step: search.Step,
    wanted: Sequence[trees.WantedLeaf],
    *,
    host: Host,
    domain: str,
) -> read_plan.ReadPlan:
    """Plans the reads of a host; its boxes are those of the leaves in their order.

    Args:
      step: complete, at least in the parts that the host needs.
      wanted: the leaves that this host needs.
      host: this one.
      domain: the kind of failure domain inside of which a peer is close.

    Raises:
      CheckpointError: if `step` lacks an element that the host needs.
    """
    boxes = wanted_boxes(wanted, step.holdings.contents)
    plan = read_plan.plan(step, [host], boxes, domain=domain)
    volumes = np.bincount(plan.of_wanted, plan.pieces.volumes, len(boxes.leaf))
    lacking = int((volumes != boxes.boxes.volumes).sum())
    if lacking:
        raise errors.CheckpointError(
            f"step {step.step}: {lacking} of {len(volumes)} array regions that this"
            " host needs are missing from the parts that it received; restore an older"
            " step"
        )
    return plan


def wanted_boxes(
    wanted: Sequence[trees.WantedLeaf], contents: Contents
) -> read_plan.Wanted:
    """The requested boxes of one host as columns, in the order of the leaves.

    Args:
      wanted: the leaves that this host needs.
      contents: of the step.
    """
    listed = [
        (0, contents.listed_path(leaf.path), box)
        for leaf in wanted
        for box in leaf.boxes
    ]
    return read_plan.Wanted.from_boxes(listed, contents=contents)


def report(bad: verified_read.BadCopy) -> BadCopyReport:
    """Returns a bad copy in the form that other hosts receive."""
    return BadCopyReport(
        host=bad.offer.host.id,
        tier=bad.offer.tier,
        file=bad.file,
        name=bad.name,
        why=bad.why,
    )


def put_right(
    holdings: Holdings,
    reader: verified_read.VerifiedReader,
    own: local.LocalHost,
    bad: Iterable[BadCopyReport],
) -> list[str]:
    """Rewrites bad copies in a host's RAM disk from another good copy.

    Args:
      holdings: of the step.
      reader: of the step.
      own: the host.
      bad: copies that any host detected.

    Returns:
      The names of the repaired items; those without another good copy are not repaired.
    """
    files = {
        each.file for each in bad if each.tier == "local" and each.host == own.host.id
    }
    if not files:
        return []
    mended = []
    for row, item in enumerate(holdings.item.tolist()):
        offer = holdings.offers[holdings.holder[row]]
        if offer.tier == "local" and offer.host.id == own.host.id:
            # A copy that cannot be written stays bad; its values were read elsewhere.
            with contextlib.suppress(errors.CheckpointError, OSError):
                if _mend(holdings, row, item, reader, own, files):
                    mended.append(holdings.name(item))
    return mended


def _mend(
    holdings: Holdings,
    row: int,
    item: int,
    reader: verified_read.VerifiedReader,
    own: local.LocalHost,
    files: Collection[str],
) -> bool:
    # Returns whether the item was bad; raises if there is no other copy.
    manifest = holdings.offers[holdings.holder[row]].manifest
    if item >= len(holdings.leaf):
        file = holdings.files[item - len(holdings.leaf)]
        if file.path not in files:
            return False
        own.put_right_file(manifest, file, reader.file(file, holdings.holders(item)))
        return True
    fragment = holdings.fragment(row)
    if fragment.file not in files:
        return False
    values = verified_read.read_item(holdings, item, reader)
    own.put_right(manifest, fragment, values)
    return True
