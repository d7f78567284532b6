"""Read plans: which parts of which saved boxes make the boxes that hosts need now.

A wanted box is cut into pieces, its intersections with saved boxes, and each element is
in one piece. A piece has all holders of its saved box, in the order in which to try
them: the reader's own local tier, close peers, distant peers, persistent storage. A
later holder is used if a read from an earlier one fails its check. Among holders that
are equally near, a hash of reader, box and holder decides (rendezvous hashing: Thaler,
Ravishankar 1998), so that readers spread over them without coordination: the plan of
one reader does not depend on the other readers that it is made for.

Glossary: w wanted boxes, p pieces, r the most dims of a leaf.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, columns, digest, errors
from elastic_ckpt.steps.manifest import Contents, Host, padded
from elastic_ckpt.steps.table import StepTable

# From the nearest holder on.
NEARNESS = ("local", "close", "distant", "persistent")
LOCAL, CLOSE, DISTANT, PERSISTENT = range(4)
_HASH_BITS, _NEARNESS_BITS = 20, 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """Boxes that hosts request, such as those of their shards under a new sharding.

    Attributes:
      reader: the number of the host that requests each, int32 `[w]`.
      leaf: the number of its leaf, int32 `[w]`.
      boxes: `[w, r]`, padded as in `Parts`.
    """

    reader: np.ndarray
    leaf: np.ndarray
    boxes: boxes.Boxes

    @classmethod
    def from_boxes(
        cls, wanted: Iterable[tuple[int, str, boxes.Box]], *, contents: Contents
    ) -> Wanted:
        """Makes columns of tuples of a reader, the path of a leaf, and a box.

        Raises:
          CheckpointError: if the step has no such leaf, or it has another shape.
        """
        listed = list(wanted)
        numbers = {leaf.path: number for number, leaf in enumerate(contents.leaves)}
        for _, path, box in listed:
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
            reader=np.array([reader for reader, _, _ in listed], np.int32),
            leaf=np.array([numbers[path] for _, path, _ in listed], np.int32),
            boxes=padded([box for _, _, box in listed], rank=contents.shapes.shape[1]),
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """The pieces to read, and the holders of each.

    Attributes:
      table: of the step that is read.
      wanted: the requested boxes.
      of_wanted: the wanted box that each piece is of, ascending, int64 `[p]`.
      item: the saved box that it is cut out of, int64 `[p]`.
      pieces: in global coordinates, `[p, r]`, padded as in `Parts`.
      choices: the holders of its item.
    """

    table: StepTable
    wanted: Wanted
    of_wanted: np.ndarray
    item: np.ndarray
    pieces: boxes.Boxes
    choices: Choices

    def __len__(self) -> int:
        return len(self.item)

    def read(self, number: int) -> Read:
        """One piece."""
        of_wanted, item = int(self.of_wanted[number]), int(self.item[number])
        rank = len(self.table.leaf(item).shape)
        piece = self.pieces.box(number, rank=rank)
        wanted = self.wanted.boxes.box(of_wanted, rank=rank)
        return Read(
            piece=piece,
            into=boxes.relative(piece, wanted),
            out_of=boxes.relative(piece, self.table.box(item)),
        )


def plan(
    table: StepTable, readers: Sequence[Host], wanted: Wanted, *, domain: str = "slice"
) -> ReadPlan:
    """Plans the reads of `readers`; it does not depend on which hosts saved the step.

    Args:
      table: of a complete step.
      readers: the hosts that `wanted.reader` numbers.
      wanted: their boxes.
      domain: the kind of failure domain inside of which a peer is close.

    Raises:
      CheckpointError: if the step is not complete.
    """
    if not table.complete:
        raise errors.CheckpointError(f"{table.problem()}; plan for a complete step")
    near = Nearness(table, readers, domain=domain)
    parts = [
        _pieces(table, wanted, leaf, near)
        for leaf in columns.distinct(wanted.leaf).tolist()
    ]
    of_wanted = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
    item = np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)])
    nothing = table.boxes.start[:0]
    pieces = boxes.Boxes(
        start=np.concatenate([nothing, *(part[2].start for part in parts)]),
        stop=np.concatenate([nothing, *(part[2].stop for part in parts)]),
    )
    order = columns.order(of_wanted)
    of_wanted, item = of_wanted[order], item[order]
    return ReadPlan(
        table=table,
        wanted=wanted,
        of_wanted=of_wanted,
        item=item,
        pieces=pieces.take(order),
        choices=near.choices(wanted.reader[of_wanted], item),
    )


class Choices(NamedTuple):
    """The holders of some items, in the order to ask them.

    Attributes:
      first: those of item k are `first[k]` to `first[k + 1]`, int64 `[n + 1]`.
      holder: their numbers in the table, int32.
    """

    first: np.ndarray
    holder: np.ndarray

    def of(self, number: int) -> list[int]:
        """Those of one item."""
        return self.holder[self.first[number] : self.first[number + 1]].tolist()


class Nearness:
    """The nearness of holders to readers, and the order among equally near ones.

    Args:
      table: of the step.
      readers: by number.
      domain: the kind of failure domain inside of which a peer is close.
    """

    def __init__(
        self, table: StepTable, readers: Sequence[Host], *, domain: str
    ) -> None:
        self._table = table
        hosts = [*readers, *(holder.host for holder in table.holders)]
        ids = np.array([digest.name_hash(host.id) for host in hosts], np.uint64)
        labels = [host.domains.get(domain, "") for host in hosts]
        domains = np.unique(labels, return_inverse=True)[1]
        count = len(readers)
        self._reader_id, self._holder_id = ids[:count], ids[count:]
        self._reader_domain, self._holder_domain = domains[:count], domains[count:]
        self._persistent = np.array(
            [holder.tier == "persistent" for holder in table.holders], bool
        )

    def between(self, reader: np.ndarray, holder: np.ndarray) -> np.ndarray:
        """Returns LOCAL to PERSISTENT, for each pair of a reader and a holder."""
        near = np.where(
            self._reader_domain[reader] == self._holder_domain[holder], CLOSE, DISTANT
        )
        near[self._reader_id[reader] == self._holder_id[holder]] = LOCAL
        near[self._persistent[holder]] = PERSISTENT
        return near

    def of_holders(self) -> list[str]:
        """Of each holder to reader 0: one of `NEARNESS`."""
        holder = np.arange(len(self._holder_id))
        near = self.between(np.zeros_like(holder), holder)
        return [NEARNESS[each] for each in near.tolist()]

    def choices(self, reader: np.ndarray, item: np.ndarray) -> Choices:
        """The holders of some items, each for one reader."""
        first = self._table.first_row
        sizes = first[item + 1] - first[item]
        piece, within = columns.runs(sizes)
        holder = self._table.holder[first[item][piece] + within]
        near = self.between(reader[piece], holder).astype(np.uint64)
        chance = digest.mixed(
            self._reader_id[reader[piece]], item[piece], self._holder_id[holder]
        )
        chance >>= np.uint64(64 - _HASH_BITS)
        # One number a row, which sorts fastest.
        key = piece.astype(np.uint64) << np.uint64(_NEARNESS_BITS) | near
        key = key << np.uint64(_HASH_BITS) | chance
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return Choices(bounds, holder[np.argsort(key, kind="stable")])

    def of_items(self) -> Choices:
        """The holders of every item, for reader 0."""
        items = np.arange(len(self._table))
        return self.choices(np.zeros_like(items), items)


def _pieces(
    table: StepTable, wanted: Wanted, leaf: int, nearness: Nearness
) -> tuple[np.ndarray, np.ndarray, boxes.Boxes]:
    # For one leaf: the wanted box and the saved box of each piece, and the piece.
    asked, held = np.flatnonzero(wanted.leaf == leaf), table.of_leaf(leaf)
    first, second = box_join.overlaps(wanted.boxes.take(asked), table.boxes.take(held))
    of_wanted, item = asked[first], held[second]
    shared = boxes.Boxes(
        start=np.maximum(wanted.boxes.start[of_wanted], table.boxes.start[item]),
        stop=np.minimum(wanted.boxes.stop[of_wanted], table.boxes.stop[item]),
    )
    if leaf not in table.overlapping:
        return of_wanted, item, shared
    reader = wanted.reader[of_wanted]
    choices = nearness.choices(reader, item)
    nearest = nearness.between(reader, choices.holder[choices.first[:-1]])
    order = np.lexsort([-shared.volumes, nearest, of_wanted])
    given = _without_overlaps(of_wanted, shared, order)
    numbers = np.array([number for number, _ in given], np.int64)
    pieces = boxes.Boxes.from_boxes([piece for _, piece in given], rank=shared.rank)
    return of_wanted[numbers], item[numbers], pieces


def _without_overlaps(
    of_wanted: np.ndarray, shared: boxes.Boxes, order: np.ndarray
) -> list[tuple[int, boxes.Box]]:
    # In `order`, each shared part adds the elements that no earlier part covers.
    given = []
    earlier: dict[int, list[int]] = collections.defaultdict(list)
    for number in order.tolist():
        before = earlier[int(of_wanted[number])]
        pieces = box_cover.gaps(shared[number], shared.take(np.array(before, int)))
        given.extend((number, pieces[each]) for each in range(len(pieces)))
        before.append(number)
    return given
