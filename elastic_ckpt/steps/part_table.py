"""Parts of one save of a step at their holders, as columns: what hosts send each other.

A host that decides for all hosts needs the manifests of all, and each host needs only
the parts that were given to it. Both are tables of the same columns. Names of files are
not in them: on RAM disks the file of a box follows from its leaf (`layout.chunk_file`).

Glossary: n parts that are boxes, each at one holder; r the most dims of a leaf.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import boxes, columns
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.holdings import Offer, Tier
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId

# The target of parts that are for no host in particular, and of those for all hosts.
NO_TARGET, ALL_HOSTS = -1, -2


class SavedStep(NamedTuple):
    """One save of one step of a run, with its contents."""

    run: str
    step_id: StepId
    contents: Contents


class Holder(NamedTuple):
    """A host that holds parts.

    Attributes:
      host: as its manifest names it.
      url: of its agent; empty if its machine is one of the world.
      tier: in which it keeps them.
    """

    host: Host
    url: str = ""
    tier: Tier = "local"


class HeldFile(NamedTuple):
    """A file of a component at a holder.

    Attributes:
      holder: its number.
      target: the host that the part is for; `NO_TARGET` or `ALL_HOSTS`.
      file: the file.
    """

    holder: int
    target: int
    file: ComponentFile


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartTable:
    """Parts of one save of a step at their holders.

    Attributes:
      saved: the step.
      holders: that have parts.
      holder: of each box, its number in `holders`, int32 `[n]`.
      target: of each box, the number of the host that it is for, int32 `[n]`.
      leaf: int32 `[n]`.
      boxes: `[n, r]`, padded as in `Fragments`.
      digest: uint64 `[n, 2]`.
      stored_bytes: int64 `[n]`.
      files: of components.
    """

    saved: SavedStep
    holders: tuple[Holder, ...]
    holder: np.ndarray
    target: np.ndarray
    leaf: np.ndarray
    boxes: boxes.Boxes
    digest: np.ndarray
    stored_bytes: np.ndarray
    files: tuple[HeldFile, ...]

    @classmethod
    def from_offer(cls, offer: Offer, *, url: str = "") -> PartTable:
        """The parts that one holder offers, for no host in particular.

        Args:
          offer: of the holder.
          url: see `Holder`.
        """
        manifest = offer.manifest
        listed = manifest.fragments
        saved = SavedStep(manifest.run, manifest.step_id, manifest.contents)
        return cls(
            saved=saved,
            holders=(Holder(manifest.host, url, offer.tier),),
            holder=np.zeros(len(listed), np.int32),
            target=np.full(len(listed), NO_TARGET, np.int32),
            leaf=listed.leaf,
            boxes=listed.boxes,
            digest=listed.digest,
            stored_bytes=listed.stored_bytes,
            files=tuple(HeldFile(0, NO_TARGET, f) for f in manifest.component_files),
        )

    def __len__(self) -> int:
        return len(self.holder)

    def take(
        self,
        rows: np.ndarray,
        files: Sequence[HeldFile],
        *,
        target: np.ndarray | None = None,
    ) -> PartTable:
        """Some boxes and files; holders that none of them is at are left out.

        Args:
          rows: of the boxes; one may be taken several times.
          files: at holders of this table.
          target: of the boxes; None for those that they have.
        """
        is_holder = np.zeros(len(self.holders), bool)
        is_holder[self.holder[rows]] = True
        is_holder[[each.holder for each in files]] = True
        new_number = np.cumsum(is_holder, dtype=np.int32) - np.int32(1)
        numbers = new_number.tolist()
        return PartTable(
            saved=self.saved,
            holders=tuple(itertools.compress(self.holders, is_holder.tolist())),
            holder=new_number[self.holder[rows]],
            target=self.target[rows] if target is None else target,
            leaf=self.leaf[rows],
            boxes=self.boxes.take(rows),
            digest=self.digest.take(rows, axis=0),
            stored_bytes=self.stored_bytes[rows],
            files=tuple(
                HeldFile(numbers[holder], of_host, file)
                for holder, of_host, file in files
            ),
        )

    def for_groups(self, group: np.ndarray, num_groups: int) -> list[PartTable]:
        """The parts for each group of hosts, and in each of them the parts for all.

        Args:
          group: of each host, by number, int64; -1 of hosts in no group.
          num_groups: of the groups.
        """
        # In no group: parts for no host in particular or for all, and unknown hosts.
        group_of = np.append(group, (-1, -1))
        of_row = group_of[np.minimum(self.target, len(group))]
        order = columns.order(of_row + 1)
        bounds = np.searchsorted(of_row[order], np.arange(num_groups + 1))
        everyone = np.flatnonzero(self.target == ALL_HOSTS)
        files: list[list[HeldFile]] = [[] for _ in range(num_groups)]
        for each in self.files:
            number = int(group_of[min(each.target, len(group))])
            if each.target == ALL_HOSTS:
                for of_group in files:
                    of_group.append(each)
            elif number >= 0:
                files[number].append(each)
        return [
            self.take(
                np.append(order[bounds[number] : bounds[number + 1]], everyone),
                files[number],
            )
            for number in range(num_groups)
        ]

    def with_urls(self, urls: Mapping[str, str]) -> PartTable:
        """The same, for a reader that is in no world.

        Args:
          urls: of the agents of machines that are known, by machine.
        """
        holders = tuple(
            each._replace(url=urls.get(each.host.machine, each.url))
            for each in self.holders
        )
        return dataclasses.replace(self, holders=holders)

    def of_tier(self, tier: Tier) -> PartTable:
        """The parts that are held in a tier."""
        is_in = np.array([holder.tier == tier for holder in self.holders], bool)
        files = [each for each in self.files if is_in[each.holder]]
        return self.take(np.flatnonzero(is_in[self.holder]), files)

    def rows_of(self, holder: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The rows of fragments in `manifests`, by holder and number there."""
        order, bounds = self._by_holder()
        return order[bounds[holder] + number]

    def manifests(self, *, named: bool = False) -> list[Manifest]:
        """A manifest of each holder, in their order, with its parts alone.

        Args:
          named: whether they name the files of boxes, of which there are few then.
        """
        order, bounds = self._by_holder()
        # In the tables that hosts offer they are in order, and are not copied.
        table = self if (order[1:] > order[:-1]).all() else self._in_order(order)
        of_holder: list[list[ComponentFile]] = [[] for _ in self.holders]
        for holder, _, file in self.files:
            of_holder[holder].append(file)
        return [
            Manifest(
                run=self.saved.run,
                step=self.saved.step_id.step,
                save=self.saved.step_id.save,
                host=holder.host,
                contents=self.saved.contents,
                fragments=table._fragments(range(first, end), named=named),
                component_files=tuple(files),
            )
            for holder, files, (first, end) in zip(
                self.holders,
                of_holder,
                itertools.pairwise(bounds.tolist()),
                strict=True,
            )
        ]

    def offers(self, *, named: bool = False) -> list[Offer]:
        """The offer of each holder, in their order, as `manifests`."""
        manifests = self.manifests(named=named)
        return [
            Offer(tier=holder.tier, manifest=manifest)
            for holder, manifest in zip(self.holders, manifests, strict=True)
        ]

    def _by_holder(self) -> tuple[np.ndarray, np.ndarray]:
        order = columns.order(self.holder)
        numbers = np.arange(len(self.holders) + 1)
        return order, np.searchsorted(self.holder[order], numbers)

    def _in_order(self, order: np.ndarray) -> PartTable:
        names = ("holder", "target", "leaf", "digest", "stored_bytes")
        ordered = {name: getattr(self, name).take(order, axis=0) for name in names}
        return dataclasses.replace(self, boxes=self.boxes.take(order), **ordered)

    def _fragments(self, rows: range, *, named: bool) -> Fragments:
        # Decisions need no files, whose names would take more memory than all the rest.
        part = slice(rows.start, rows.stop)
        number = np.arange(len(rows), dtype=np.int32)
        return Fragments(
            leaf=self.leaf[part],
            boxes=boxes.Boxes(start=self.boxes.start[part], stop=self.boxes.stop[part]),
            digest=self.digest[part],
            file=number if named else np.zeros_like(number),
            offset=np.zeros(len(rows), np.int64),
            stored_bytes=self.stored_bytes[part],
            files=tuple(map(self._file, rows)) if named else ("",),
        )

    def _file(self, row: int) -> str:
        leaf = self.saved.contents.leaves[self.leaf[row]]
        box = self.boxes.box(row, rank=len(leaf.shape))
        return layout.chunk_file(leaf.path, box, box.shape)


def joined(tables: Sequence[PartTable]) -> list[PartTable]:
    """One table for each step that some tables are of, in the order of the tables."""
    alike: list[list[PartTable]] = []
    for table in tables:
        group = next((each for each in alike if _is_alike(each[0], table)), None)
        if group is None:
            alike.append([table])
        else:
            group.append(table)
    return [_joined(group) for group in alike]


def _is_alike(first: PartTable, second: PartTable) -> bool:
    a, b = first.saved, second.saved
    # Contents that were parsed are mostly the same object.
    alike = a.contents is b.contents or a.contents == b.contents
    return a[:3] == b[:3] and alike


def _joined(tables: Sequence[PartTable]) -> PartTable:
    if len(tables) == 1:
        return tables[0]
    before = np.cumsum([0, *(len(table.holders) for table in tables)]).tolist()
    shifted = list(zip(tables, before, strict=False))
    return PartTable(
        saved=tables[0].saved,
        holders=tuple(holder for table in tables for holder in table.holders),
        holder=np.concatenate(
            [table.holder + np.int32(number) for table, number in shifted]
        ),
        target=np.concatenate([table.target for table in tables]),
        leaf=np.concatenate([table.leaf for table in tables]),
        boxes=boxes.Boxes(
            start=np.concatenate([table.boxes.start for table in tables]),
            stop=np.concatenate([table.boxes.stop for table in tables]),
        ),
        digest=np.concatenate([table.digest for table in tables]),
        stored_bytes=np.concatenate([table.stored_bytes for table in tables]),
        files=tuple(
            HeldFile(holder + number, target, file)
            for table, number in shifted
            for holder, target, file in table.files
        ),
    )
