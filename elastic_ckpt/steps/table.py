"""A step's table: which holder has which parts, and whether any are missing.

An item is a distinct box of a leaf; replicas are one item with more than one holder.
All decisions about a step (completeness, copies, read plans) are arithmetic on these
columns, so 1e6 boxes on 1e4 hosts take only seconds.

Glossary: i items, n rows (an item at a holder), r the maximum number of dims of a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import box_cover, boxes, columns, errors
from elastic_ckpt.steps.manifest import Holder, Host, Leaf, Manifest, Parts


class StepTable:
    """The union of one or more manifests of one save of a step.

    Attributes:
      items: one part for each item, ordered by leaf and bounds, `[i]`.
      boxes: the boxes of the items, `[i, r]`.
      num_bytes: the size of each item, int64 `[i]`.
      first_row: the rows of item k are `first_row[k]` to `first_row[k + 1]`, int64
        `[i + 1]`.
      item: the item of each row, in ascending order, int64 `[n]`.
      holder: the holder of each row, in ascending order within an item, int64 `[n]`.
      diverged: the indices of items whose holders have different values, int64.

    Raises:
      CheckpointError: if the manifests differ in run, step, save or contents.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifest = whole = Manifest.merged(manifests)
        self.run, self.step_id = whole.run, whole.step_id
        self.contents, self.holders = whole.contents, whole.holders
        rows = whole.parts
        first, item = columns.distinct_rows(
            np.column_stack([rows.leaf, rows.start, rows.stop])
        )
        self.items: Parts = rows.take(first)
        self.boxes = self.items.boxes
        self.num_bytes = self.contents.num_bytes(self.items)
        place = item * len(self.holders) + rows.holder
        # Keeps an item only once even if its holder is listed twice.
        _, row = np.unique(place, return_index=True)
        self._row, self.item, self.holder = row, item[row], rows.holder[row]
        self.first_row = np.searchsorted(self.item, np.arange(len(first) + 1))
        same = rows.digest == self.items.digest.take(item, axis=0)
        self.diverged = np.unique(item[~same.all(axis=1)])

    def __len__(self) -> int:
        return len(self.num_bytes)

    def of_leaf(self, leaf: int) -> np.ndarray:
        """The items of one leaf, int64."""
        ends = np.searchsorted(self.items.leaf, [leaf, leaf + 1])
        return np.arange(*ends)

    def leaf(self, item: int) -> Leaf:
        """The leaf of an item."""
        return self.contents.leaves[self.items.leaf[item]]

    def box(self, item: int) -> boxes.Box:
        """The box of an item, in the coordinates of its leaf."""
        return self.boxes.box(item, rank=len(self.leaf(item).shape))

    def digest(self, item: int) -> bytes:
        """The digest of the values of an item."""
        return self.items.digest[item].tobytes()

    def digest_at(self, row: int) -> bytes:
        """The digest that a row's holder lists."""
        return self.manifest.parts.digest[self._row[row]].tobytes()

    def holders_of(self, item: int) -> list[int]:
        """The holders of an item, in ascending order."""
        rows = slice(self.first_row[item], self.first_row[item + 1])
        return self.holder[rows].tolist()

    def holder_sets(self, hosts: Sequence[Host]) -> list[tuple[int, ...]]:
        """For each item, the sorted indices of the `hosts` that have it in RAM."""
        numbers = {host.id: number for number, host in enumerate(hosts)}
        host = np.array(
            [
                numbers.get(holder.host.id, -1) if holder.tier == "local" else -1
                for holder in self.holders
            ]
        )[self.holder].tolist()
        return [
            tuple(sorted({each for each in host[a:b] if each >= 0}))
            for a, b in itertools.pairwise(self.first_row.tolist())
        ]

    def held_by(self, counts: Callable[[Holder], bool]) -> StepTable:
        """The same table, with only the parts of holders that `counts` accepts."""
        is_counted = np.array([counts(each) for each in self.holders], bool)
        rows = self.manifest.parts
        parts = rows.take(np.flatnonzero(is_counted[rows.holder]))
        return StepTable([dataclasses.replace(self.manifest, parts=parts)])

    def name(self, item: int) -> str:
        """Names an item for messages: leaf and bounds, or a file path."""
        return self.leaf(item).name_of(self.box(item))

    @functools.cached_property
    def gaps(self) -> Mapping[int, boxes.Boxes]:
        """By leaf, the disjoint boxes that no holder has, `[., r]`."""
        shapes = self.contents.shapes
        tiled = box_cover.tiled(shapes, self.items.leaf, self.boxes)
        of_leaves = {
            leaf: box_cover.gaps(
                boxes.whole(shapes[leaf].tolist()),
                self.boxes.take(self.of_leaf(leaf)),
            )
            for leaf in np.flatnonzero(~tiled).tolist()
        }
        return {leaf: gaps for leaf, gaps in of_leaves.items() if len(gaps)}

    @functools.cached_property
    def overlapping(self) -> frozenset[int]:
        """The leaves whose saved boxes overlap."""
        sizes = np.prod(self.contents.shapes, axis=1)
        for leaf, gaps in self.gaps.items():
            sizes[leaf] -= gaps.volumes.sum()
        held = np.bincount(self.items.leaf, self.boxes.volumes, len(sizes))
        return frozenset(np.flatnonzero(held > sizes).tolist())

    @functools.cached_property
    def complete(self) -> bool:
        """Whether all parts are there and each part's holders have the same values."""
        return not (self.gaps or len(self.diverged))

    def problem(self) -> str:
        """A human-readable message that says why the step is not complete."""
        tiers = " and ".join(sorted({holder.tier for holder in self.holders}))
        return f"step {self.step_id.step} in {tiers} {self.lacking()}"

    def lacking(self) -> str:
        """The end of `problem`: which parts are missing or differ between holders."""
        leaves, problems = self.contents.leaves, []
        named = [
            leaves[leaf].name_of(gaps.box(n, rank=len(leaves[leaf].shape)))
            for leaf, gaps in self.gaps.items()
            for n in range(len(gaps))
        ]
        if named:
            problems.append(
                f"lacks parts of {len(self.gaps)} of {len(leaves)} arrays and files:"
                f" [{errors.first_of(named)}]"
            )
        diverged = self.diverged.tolist()
        if diverged:
            problems.append(
                f"has different values at the holders of {len(diverged)} parts:"
                f" [{errors.first_of(map(self.name, diverged))}]"
            )
        return ", and ".join(problems)
