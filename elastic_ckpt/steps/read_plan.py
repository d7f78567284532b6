"""Read plans: which parts of which saved boxes make the boxes that hosts need now.

A wanted box is cut into pieces, its intersections with saved boxes, and each element is
in one piece. A piece has all holders of its saved box, in the order in which to try
them: the reader's own local tier, close peers, distant peers, persistent storage. A
later holder is used if a read from an earlier one fails its check. Among holders that
are equally near, a hash of reader, box and holder decides (rendezvous hashing: Thaler,
Ravishankar 1998), so that readers spread over them without coordination.

Glossary: w wanted boxes, p pieces, r the most dims of a leaf.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, columns, digest, errors
from elastic_ckpt.steps.manifest import Contents, Holder, Host
from elastic_ckpt.steps.table import StepTable

# From the nearest holder on.
NEARNESS = ("local", "close", "distant", "persistent")
LOCAL, CLOSE, DISTANT, PERSISTENT = range(4)
_HASH_BITS, _NEARNESS_BITS = 20, 2


class Wanted(NamedTuple):
    """Boxes that a host requests, such as those of its shards under a new sharding.

    Attributes:
      leaf: the number of the leaf of each, int64 `[w]`.
      boxes: `[w, r]`, padded as in `Parts`.
    """

    leaf: np.ndarray
    boxes: boxes.Boxes

    @classmethod
    def from_boxes(
        cls, wanted: Iterable[tuple[str, boxes.Box]], *, contents: Contents
    ) -> Wanted:
        """Makes columns of the path of a leaf, and a box, each.

        Raises:
          CheckpointError: if the step has no such leaf, or it has another shape.
        """
        listed = list(wanted)
        numbers = {leaf.path: number for number, leaf in enumerate(contents.leaves)}
        for path, box in listed:
            if path not in numbers:
                raise errors.CheckpointError(
                    f"the step has no leaf {path!r}; it has {sorted(numbers)}"
                )
            whole = boxes.whole(contents.leaves[numbers[path]].shape)
            if len(box.start) != len(whole.start) or not boxes.contains(whole, box):
                raise errors.CheckpointError(
                    f"{path}{box} is outside of what was saved, {path}{whole}; restore"
                    " it with the shape that it was saved with"
                )
        return cls(
            leaf=np.array([numbers[path] for path, _ in listed], np.int64),
            boxes=boxes.Boxes.from_boxes(
                [box for _, box in listed], rank=contents.shapes.shape[1]
            ),
        )


class Read(NamedTuple):
    """One piece.

    Attributes:
      piece: in global coordinates.
      into: where the piece goes in the wanted box.
      out_of: where the piece lies in the saved box.
    """

    piece: boxes.Box
    into: tuple[slice, ...]
    out_of: tuple[slice, ...]


class ReadPlan:
    """The pieces that a host reads; it does not depend on which hosts saved the step.

    Args:
      near: the holders of a complete step, as the host sees them.
      wanted: its boxes.

    Attributes:
      table: of the step that is read.
      wanted: the requested boxes.
      of_wanted: the wanted box that each piece is of, ascending, int64 `[p]`.
      item: the saved box that it is cut out of, int64 `[p]`.
      pieces: in global coordinates, `[p, r]`, padded as in `Parts`.

    Raises:
      CheckpointError: if the step is not complete.
    """

    def __init__(self, near: Nearness, wanted: Wanted) -> None:
        self.table, self.wanted, table = near.table, wanted, near.table
        if not table.complete:
            raise errors.CheckpointError(f"{table.problem()}; plan for a complete step")
        none = np.empty(0, np.int64)
        parts = [(none, none, table.boxes.take(none))]
        parts += [_pieces(wanted, leaf, near) for leaf in {*wanted.leaf.tolist()}]
        of_wanted, item, pieces = zip(*parts, strict=True)
        order = columns.order(np.concatenate(of_wanted))
        self.of_wanted = np.concatenate(of_wanted)[order]
        self.item = np.concatenate(item)[order]
        self.pieces = boxes.Boxes(
            start=np.concatenate([each.start for each in pieces])[order],
            stop=np.concatenate([each.stop for each in pieces])[order],
        )

    def read(self, number: int) -> Read:
        """One piece."""
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
    """The nearness of holders to a reader, and the order among equally near ones.

    Args:
      table: of the step.
      reader: the host.
      domain: the kind of failure domain inside of which a peer is close.

    Attributes:
      table: as given.
      of_holders: LOCAL to PERSISTENT of each holder.
      nearest: that of the nearest holder of each item.
      holders: of all items, in the rows of the table, in the order to ask them.
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
        # One number a row, which sorts fastest.
        key = item << np.uint64(_NEARNESS_BITS)
        key = (key | of_rows) << np.uint64(_HASH_BITS) | chance
        self.holders = table.holder[np.argsort(key, kind="stable")]

    def holders_of(self, item: int) -> list[int]:
        """The holders of an item, by number, in the order to ask them."""
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
    # For one leaf: the wanted box and the saved box of each piece, and the piece.
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
    # Each shared part adds the elements that none before it covers.
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
