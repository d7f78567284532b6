"""Read plans: how a host assembles the boxes that it needs from saved boxes.

A wanted box is cut into pieces, its intersections with saved boxes, so that each
element is in exactly one piece. A reader tries a saved box's holders in order: its own
local tier, close peers, distant peers, persistent storage. If a holder's values fail
verification, the reader tries the next holder. Equally near holders are ordered by a
hash of reader, box and holder (rendezvous hashing: Thaler, Ravishankar 1998), which
spreads readers over holders without coordination.

Glossary: w wanted boxes, p pieces, r the maximum number of dims of a leaf.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, digest, errors
from elastic_ckpt.steps.manifest import Contents, Holder, Host
from elastic_ckpt.steps.table import StepTable

# Nearest first.
NEARNESS = ("local", "close", "distant", "persistent")
LOCAL, CLOSE, DISTANT, PERSISTENT = range(4)
_HASH_BITS, _NEARNESS_BITS = 20, 2


class Wanted(NamedTuple):
    """Boxes that a host requests, such as its shards under a new sharding.

    Attributes:
      leaf: the index of each box's leaf, int64 `[w]`.
      boxes: the boxes, `[w, r]`, padded as in `Parts`.
    """

    leaf: np.ndarray
    boxes: boxes.Boxes

    @classmethod
    def from_boxes(
        cls, wanted: Iterable[tuple[str, boxes.Box]], *, contents: Contents
    ) -> Wanted:
        """Converts pairs of a leaf's path and a box to columns.

        Raises:
          CheckpointError: if the step lacks a leaf, or a box extends outside its leaf.
        """
        listed = list(wanted)
        numbers = {leaf.path: number for number, leaf in enumerate(contents.leaves)}
        for path, box in listed:
            if path not in numbers:
                raise errors.CheckpointError(
                    f"the step has no leaf {path!r}; its leaves are {sorted(numbers)}"
                )
            whole = boxes.whole(contents.leaves[numbers[path]].shape)
            if len(box.start) != len(whole.start) or not boxes.contains(whole, box):
                raise errors.CheckpointError(
                    f"{path}{box} extends outside the saved array, {path}{whole};"
                    " request the saved shape"
                )
        return cls(
            leaf=np.array([numbers[path] for path, _ in listed], np.int64),
            boxes=boxes.Boxes.from_boxes(
                [box for _, box in listed], rank=contents.shapes.shape[1]
            ),
        )


class Read(NamedTuple):
    """How to read one piece.

    Attributes:
      into: where the piece goes in the wanted box.
      out_of: where the piece lies in the saved box.
    """

    piece: boxes.Box
    into: tuple[slice, ...]
    out_of: tuple[slice, ...]


class ReadPlan:
    """The pieces that a host reads, independent of which hosts saved the step.

    Attributes:
      of_wanted: the wanted box of each piece, in ascending order, int64 `[p]`.
      item: the saved box that each piece is cut from, int64 `[p]`.
      pieces: the boxes of the pieces in global coordinates, `[p, r]`, padded as in
        `Parts`.

    Raises:
      CheckpointError: if the step is not complete.
    """

    def __init__(self, near: Nearness, wanted: Wanted) -> None:
        self.table, self.wanted, table = near.table, wanted, near.table
        if not table.complete:
            raise errors.CheckpointError(
                f"{table.problem()}; only a complete step can be read"
            )
        none = np.empty(0, np.int64)
        parts = [(none, none, table.boxes.take(none))]
        parts += [_pieces(wanted, leaf, near) for leaf in {*wanted.leaf.tolist()}]
        of_wanted, item, pieces = zip(*parts, strict=True)
        order = np.argsort(np.concatenate(of_wanted), kind="stable")
        self.of_wanted = np.concatenate(of_wanted)[order]
        self.item = np.concatenate(item)[order]
        self.pieces = boxes.Boxes(
            start=np.concatenate([each.start for each in pieces])[order],
            stop=np.concatenate([each.stop for each in pieces])[order],
        )

    def read(self, number: int) -> Read:
        """How to read a piece."""
        of_wanted, item = self.of_wanted[number], self.item[number]
        rank = len(self.table.leaf(item).shape)
        piece = self.pieces.box(number, rank=rank)
        wanted = self.wanted.boxes.box(of_wanted, rank=rank)
        return Read(
            piece=piece,
            into=boxes.relative(piece, wanted),
            out_of=boxes.relative(piece, self.table.box(item)),
        )


class Nearness:
    """How near holders are to a reader, and in which order to try them.

    Args:
      domain: the kind of failure domain within which a peer counts as close.

    Attributes:
      of_holders: the nearness of each holder, LOCAL to PERSISTENT.
      nearest: the nearness of each item's nearest holder.
      holders: the holder of each table row, reordered within each item to the order in
        which to try them.
    """

    def __init__(
        self, table: StepTable, reader: Host, *, domain: str = "slice"
    ) -> None:
        self.table = table
        self.of_holders = np.array(
            [_nearness(each, reader, domain) for each in table.holders], np.uint64
        )
        of_rows = self.of_holders[table.holder]
        self.nearest = np.minimum.reduceat(of_rows, table.first_row[:-1])
        item = table.item.astype(np.uint64)
        names = [digest.name_hash(each.host.id) for each in table.holders]
        name = np.array(names, np.uint64)[table.holder]
        own = np.array(digest.name_hash(reader.id), np.uint64)
        chance = digest.mixed(own, item, name) >> np.uint64(64 - _HASH_BITS)
        # Sorting one number per row is fastest.
        key = item << np.uint64(_NEARNESS_BITS)
        key = (key | of_rows) << np.uint64(_HASH_BITS) | chance
        self.holders = table.holder[np.argsort(key, kind="stable")]

    def holders_of(self, item: int) -> list[int]:
        """The indices of an item's holders, in the order to try them."""
        first = self.table.first_row
        return self.holders[first[item] : first[item + 1]].tolist()


def _nearness(holder: Holder, reader: Host, domain: str) -> int:
    if holder.tier == "persistent":
        return PERSISTENT
    if holder.host.id == reader.id:
        return LOCAL
    is_close = holder.host.domains.get(domain, "") == reader.domains.get(domain, "")
    return CLOSE if is_close else DISTANT


def _pieces(
    wanted: Wanted, leaf: int, near: Nearness
) -> tuple[np.ndarray, np.ndarray, boxes.Boxes]:
    # For one leaf: each piece's wanted box, saved box and bounds.
    table = near.table
    asked, held = np.flatnonzero(wanted.leaf == leaf), table.of_leaf(leaf)
    first, second = box_join.overlaps(wanted.boxes.take(asked), table.boxes.take(held))
    of_wanted, item = asked[first], held[second]
    shared = boxes.Boxes(
        start=np.maximum(wanted.boxes.start[of_wanted], table.boxes.start[item]),
        stop=np.minimum(wanted.boxes.stop[of_wanted], table.boxes.stop[item]),
    )
    if leaf not in table.overlapping:
        return of_wanted, item, shared
    # Each overlap contributes the elements that no earlier one covers.
    numbers, given = [], []
    earlier: dict[int, list[int]] = collections.defaultdict(list)
    for number in np.lexsort([-shared.volumes, near.nearest[item]]).tolist():
        before = earlier[of_wanted[number]]
        gaps = box_cover.gaps(shared[number], shared.take(np.array(before, int)))
        given += [gaps[each] for each in range(len(gaps))]
        numbers += [number] * len(gaps)
        before.append(number)
    pieces = boxes.Boxes.from_boxes(given, rank=shared.rank)
    return of_wanted[numbers], item[numbers], pieces
