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

import numpy as np

from elastic_ckpt.core import box_cover, box_join, boxes, columns, digest, errors
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Host,
    padded,
)
from elastic_ckpt.steps.search import Step

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
      boxes: `[w, r]`, padded as in `Fragments`.
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
            boxes=padded([box for _, _, box in listed], rank=contents.rank),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """One piece, with all that a reader needs to read it.

    Attributes:
      path: of the leaf.
      piece: in global coordinates.
      into: where the piece goes in the wanted box.
      out_of: where the piece lies in the saved box.
      choices: its holders, and their fragments, in the order to try them.
    """

    path: str
    piece: boxes.Box
    into: tuple[slice, ...]
    out_of: tuple[slice, ...]
    choices: tuple[tuple[Offer, Fragment], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """The pieces to read, and the holders of each.

    Attributes:
      holdings: of the step that is read.
      wanted: the requested boxes.
      of_wanted: the wanted box that each piece is of, ascending, int64 `[p]`.
      box: the saved box that it is cut out of, int64 `[p]`.
      pieces: in global coordinates, `[p, r]`, padded as in `Fragments`.
      first_choice: the choices of piece i are `first_choice[i]` to
        `first_choice[i + 1]`, int64 `[p + 1]`.
      choice: rows of the holdings, in the order to try them, int64.
    """

    holdings: Holdings
    wanted: Wanted
    of_wanted: np.ndarray
    box: np.ndarray
    pieces: boxes.Boxes
    first_choice: np.ndarray
    choice: np.ndarray

    def __len__(self) -> int:
        return len(self.box)

    def read(self, number: int) -> Read:
        """One piece."""
        of_wanted, box = int(self.of_wanted[number]), int(self.box[number])
        leaf = self.holdings.contents.leaves[self.wanted.leaf[of_wanted]]
        rank = len(leaf.shape)
        piece = self.pieces.box(number, rank=rank)
        wanted = self.wanted.boxes.box(of_wanted, rank=rank)
        saved = self.holdings.boxes.box(box, rank=rank)
        rows = self.choice[self.first_choice[number] : self.first_choice[number + 1]]
        return Read(
            path=leaf.path,
            piece=piece,
            into=boxes.relative(piece, wanted),
            out_of=boxes.relative(piece, saved),
            choices=tuple(
                (
                    self.holdings.offers[self.holdings.holder[row]],
                    self.holdings.fragment(row),
                )
                for row in rows.tolist()
            ),
        )


def plan(
    step: Step, readers: Sequence[Host], wanted: Wanted, *, domain: str = "slice"
) -> ReadPlan:
    """Plans the reads of `readers`; it does not depend on which hosts saved the step.

    Args:
      step: a complete step.
      readers: the hosts that `wanted.reader` numbers.
      wanted: their boxes.
      domain: the kind of failure domain inside of which a peer is close.

    Raises:
      CheckpointError: if the step is not complete.
    """
    if not step.complete:
        raise errors.CheckpointError(f"{step.problem()}; plan for a complete step")
    holdings = step.holdings
    nearness = _Nearness(holdings, readers, domain)
    parts = [
        _pieces(step, wanted, leaf, nearness)
        for leaf in columns.distinct(wanted.leaf).tolist()
    ]
    of_wanted = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
    box = np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)])
    rank = holdings.contents.rank
    nothing = boxes.Boxes.from_boxes([], rank=rank).start
    pieces = boxes.Boxes(
        start=np.concatenate([nothing, *(part[2].start for part in parts)]),
        stop=np.concatenate([nothing, *(part[2].stop for part in parts)]),
    )
    order = columns.order(of_wanted)
    of_wanted, box = of_wanted[order], box[order]
    first_choice, choice = nearness.choices(wanted.reader[of_wanted], box)
    return ReadPlan(
        holdings=holdings,
        wanted=wanted,
        of_wanted=of_wanted,
        box=box,
        pieces=pieces.take(order),
        first_choice=first_choice,
        choice=choice,
    )


def files(
    step: Step, reader: Host, component: str, *, domain: str = "slice"
) -> list[tuple[ComponentFile, tuple[Offer, ...]]]:
    """The files of a component, each with its holders in the order to try them.

    Files of the same name hold the same bytes; a part may be in several files.
    """
    holdings = step.holdings
    nearness = _Nearness(holdings, [reader], domain)
    holders = []
    for number, file in enumerate(holdings.files, start=len(holdings.leaf)):
        if file.component == component:
            nobody_else = np.zeros(1, np.int64)
            _, rows = nearness.choices(nobody_else, np.array([number]))
            offers = [holdings.offers[holder] for holder in holdings.holder[rows]]
            holders.append((file, tuple(offers)))
    return holders


def box_choices(
    step: Step, reader: Host, *, domain: str = "slice"
) -> tuple[np.ndarray, np.ndarray]:
    """The holders of every saved box, for a reader that reads boxes whole.

    Returns:
      As `ReadPlan.first_choice` and `ReadPlan.choice`, by the number of a saved box.
    """
    items = np.arange(len(step.holdings.leaf))
    near = _Nearness(step.holdings, [reader], domain)
    return near.choices(np.zeros_like(items), items)


def nearness(holdings: Holdings, reader: Host, *, domain: str) -> dict[Offer, str]:
    """The nearness of each holder to a reader: one of `NEARNESS`."""
    of_reader = _Nearness(holdings, [reader], domain)
    holder = np.arange(len(holdings.offers))
    near = of_reader.between(np.zeros_like(holder), holder)
    names = [NEARNESS[each] for each in near.tolist()]
    return dict(zip(holdings.offers, names, strict=True))


class _Nearness:
    """The nearness of holders to readers, and the order among equally near ones."""

    def __init__(
        self, holdings: Holdings, readers: Sequence[Host], domain: str
    ) -> None:
        self._holdings = holdings
        hosts = [*readers, *(offer.host for offer in holdings.offers)]
        ids = np.array([digest.name_hash(host.id) for host in hosts], np.uint64)
        labels = [host.domains.get(domain, "") for host in hosts]
        domains = np.unique(labels, return_inverse=True)[1]
        count = len(readers)
        self._reader_id, self._holder_id = ids[:count], ids[count:]
        self._reader_domain, self._holder_domain = domains[:count], domains[count:]
        self._persistent = np.array(
            [offer.tier == "persistent" for offer in holdings.offers], bool
        )

    def between(self, reader: np.ndarray, holder: np.ndarray) -> np.ndarray:
        """Returns LOCAL to PERSISTENT, for each pair of a reader and a holder."""
        near = np.where(
            self._reader_domain[reader] == self._holder_domain[holder], CLOSE, DISTANT
        )
        near[self._reader_id[reader] == self._holder_id[holder]] = LOCAL
        near[self._persistent[holder]] = PERSISTENT
        return near

    def choices(
        self, reader: np.ndarray, item: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `first_choice` and `choice` of a plan, for items and readers."""
        first = self._holdings.first_row
        sizes = first[item + 1] - first[item]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        piece, within = columns.runs(sizes)
        row = first[item][piece] + within
        holder = self._holdings.holder[row]
        near = self.between(reader[piece], holder).astype(np.uint64)
        chance = self._chance(reader[piece], item[piece], holder)
        chance >>= np.uint64(64 - _HASH_BITS)
        # One number a row, which sorts fastest.
        key = piece.astype(np.uint64) << np.uint64(_NEARNESS_BITS) | near
        key = key << np.uint64(_HASH_BITS) | chance
        return bounds, row[np.argsort(key, kind="stable")]

    def _chance(
        self, reader: np.ndarray, item: np.ndarray, holder: np.ndarray
    ) -> np.ndarray:
        return digest.mixed(self._reader_id[reader], item, self._holder_id[holder])


def _pieces(
    step: Step, wanted: Wanted, leaf: int, nearness: _Nearness
) -> tuple[np.ndarray, np.ndarray, boxes.Boxes]:
    # For one leaf: the wanted box and the saved box of each piece, and the piece.
    holdings = step.holdings
    asked, held = np.flatnonzero(wanted.leaf == leaf), holdings.of_leaf(leaf)
    first, second = box_join.overlaps(
        wanted.boxes.take(asked), holdings.boxes.take(held)
    )
    of_wanted, box = asked[first], held[second]
    shared = boxes.Boxes(
        start=np.maximum(wanted.boxes.start[of_wanted], holdings.boxes.start[box]),
        stop=np.minimum(wanted.boxes.stop[of_wanted], holdings.boxes.stop[box]),
    )
    if leaf not in step.overlapping:
        return of_wanted, box, shared
    reader = wanted.reader[of_wanted]
    bounds, row = nearness.choices(reader, box)
    nearest = nearness.between(reader, holdings.holder[row[bounds[:-1]]])
    order = np.lexsort([-shared.volumes, nearest, of_wanted])
    given = _without_overlaps(of_wanted, shared, order)
    numbers = np.array([number for number, _ in given], np.int64)
    pieces = boxes.Boxes.from_boxes([piece for _, piece in given], rank=shared.rank)
    return of_wanted[numbers], box[numbers], pieces


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
