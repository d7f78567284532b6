"""Holdings: the manifests of one save of a step, as one table of items and holders.

An item is a box, or a file of a component: the first b items are the boxes, then come
the files. Replicas are one item with several holders. All decisions (placement, search,
read plans) are arithmetic over these columns, so that 1e6 boxes of 1e4 hosts take
seconds.

Glossary: b boxes, f files, n rows (an item at a holder), r the most dims of a leaf.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from elastic_ckpt.core import boxes, columns, errors
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Host,
    Manifest,
)

# A host's own memory is its local tier, and to all others it is the peer tier.
Tier = Literal["local", "persistent"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """The parts of a step that can be read now from one holder.

    Attributes:
      tier: the tier in which the holder keeps them.
      manifest: lists the parts of one step.
    """

    tier: Tier
    manifest: Manifest

    @property
    def host(self) -> Host:
        """The holder."""
        return self.manifest.host


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """The union of several offers, as a table of items and holders.

    Attributes:
      offers: of one run, step and save; the number of a holder is its index here.
      contents: of the step.
      leaf: of each box, ascending, int32 `[b]`.
      boxes: every box that a holder has, once, ordered by leaf and bounds; `[b, r]`,
        padded as in `Fragments`.
      files: every file of a component that a holder has, once, ordered by path.
      stored_bytes: of each item at its first holder, int64 `[b + f]`.
      first_row: the rows of item i are `first_row[i]` to `first_row[i + 1]`, int64
        `[b + f + 1]`.
      holder: of each row, ascending in an item, int32 `[n]`.
      number: of each row, its fragment in the holder's manifest, or its place among the
        manifest's component files, int32 `[n]`.
      diverged: the items whose holders do not have the same values, int64.
    """

    offers: tuple[Offer, ...]
    contents: Contents
    leaf: np.ndarray
    boxes: boxes.Boxes
    files: tuple[ComponentFile, ...]
    stored_bytes: np.ndarray
    first_row: np.ndarray
    holder: np.ndarray
    number: np.ndarray
    diverged: np.ndarray

    @classmethod
    def from_offers(cls, offers: Sequence[Offer]) -> Holdings:
        """The table of `offers`, at least one.

        Raises:
          CheckpointError: if they are of different runs, steps, saves or contents.
        """
        _check_alike(offers)
        parts = [offer.manifest.fragments for offer in offers]
        sizes = np.array([len(part) for part in parts])
        leaf = np.concatenate([part.leaf for part in parts])
        start = np.concatenate([part.boxes.start for part in parts])
        stop = np.concatenate([part.boxes.stop for part in parts])
        first, box = columns.distinct_rows(np.column_stack([leaf, start, stop]))
        digest = np.concatenate([part.digest for part in parts])
        differs = (digest != digest.take(first[box], axis=0)).any(axis=1)
        of_offer, number = columns.runs(sizes)
        stored = np.concatenate([part.stored_bytes for part in parts])
        files, file, file_offer, file_number, spoilt = _files(offers)
        item = np.concatenate([box, len(first) + file])
        rows = columns.order(item)
        num_rows = np.bincount(item, minlength=len(first) + len(files))
        file_bytes = np.array([each.stored_bytes for each in files], np.int64)
        holder = np.concatenate([of_offer, file_offer])[rows]
        diverged = np.concatenate([box[differs], len(first) + spoilt])
        return cls(
            offers=tuple(offers),
            contents=offers[0].manifest.contents,
            leaf=leaf[first],
            boxes=boxes.Boxes(start=start[first], stop=stop[first]),
            files=files,
            stored_bytes=np.concatenate([stored[first], file_bytes]),
            first_row=np.concatenate([[0], np.cumsum(num_rows)]),
            holder=holder.astype(np.int32),
            number=np.concatenate([number, file_number])[rows].astype(np.int32),
            diverged=columns.distinct(diverged),
        )

    @property
    def num_items(self) -> int:
        """All boxes and files: b + f."""
        return len(self.stored_bytes)

    @property
    def item(self) -> np.ndarray:
        """The item of each row, ascending, int64 `[n]`."""
        return np.repeat(np.arange(self.num_items), np.diff(self.first_row))

    def of_leaf(self, leaf: int) -> np.ndarray:
        """The boxes of one leaf, int64."""
        ends = np.searchsorted(self.leaf, [leaf, leaf + 1])
        return np.arange(*ends)

    def holders(self, item: int) -> list[Offer]:
        """Returns the offers that have an item."""
        rows = slice(self.first_row[item], self.first_row[item + 1])
        return [self.offers[holder] for holder in self.holder[rows]]

    def host_of_rows(self, hosts: Sequence[Host]) -> np.ndarray:
        """Returns the index in `hosts` of each row's holder, int64 `[n]`; -1 if absent.

        Rows outside of the local tiers have -1.
        """
        numbers = {host.id: number for number, host in enumerate(hosts)}
        of_offer = np.array(
            [
                numbers.get(offer.host.id, -1) if offer.tier == "local" else -1
                for offer in self.offers
            ],
            np.int64,
        )
        return of_offer[self.holder]

    def holder_sets(self, hosts: Sequence[Host]) -> list[tuple[int, ...]]:
        """The indices in `hosts` of each item's holders in local tiers, ascending."""
        host = self.host_of_rows(hosts)
        there = np.flatnonzero(host >= 0)
        num_hosts = max(1, len(hosts))
        item, holder = np.divmod(
            columns.distinct(self.item[there] * num_hosts + host[there]), num_hosts
        )
        ends = np.searchsorted(item, np.arange(self.num_items + 1)).tolist()
        listed = holder.tolist()
        return [tuple(listed[a:b]) for a, b in itertools.pairwise(ends)]

    def fragment(self, row: int) -> Fragment:
        """Returns the fragment of a row of a box; rows of files have none."""
        fragments = self.offers[self.holder[row]].manifest.fragments
        return fragments.row(int(self.number[row]), contents=self.contents)

    def name(self, item: int) -> str:
        """Names an item for messages: leaf and bounds, or the path of a file."""
        if item >= len(self.leaf):
            return self.files[item - len(self.leaf)].path
        leaf = self.contents.leaves[self.leaf[item]]
        return f"{leaf.path}{self.boxes.box(item, rank=len(leaf.shape))}"


def _check_alike(offers: Sequence[Offer]) -> None:
    first = offers[0].manifest
    for offer in offers:
        manifest = offer.manifest
        alike = (
            manifest.contents is first.contents or manifest.contents == first.contents
        )
        same = (manifest.run, manifest.step, manifest.save) == (
            first.run,
            first.step,
            first.save,
        )
        if not (same and alike):
            raise errors.CheckpointError(
                f"the manifest of host {manifest.host.id!r} (run {manifest.run!r}, step"
                f" {manifest.step}, save {manifest.save!r}) lists another step than"
                f" that of host {first.host.id!r} (run {first.run!r}, step"
                f" {first.step}, save {first.save!r}); remove the one that does not"
                " belong there"
            )


def _files(
    offers: Sequence[Offer],
) -> tuple[tuple[ComponentFile, ...], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # The files; for each row its file, its offer and its index there; the files that
    # differ.
    first: dict[str, ComponentFile] = {}
    rows = []
    spoilt = set()
    for offer_number, offer in enumerate(offers):
        for place, file in enumerate(offer.manifest.component_files):
            rows.append((file.path, offer_number, place))
            if first.setdefault(file.path, file) != file:
                spoilt.add(file.path)
    paths = sorted(first)
    numbers = {path: number for number, path in enumerate(paths)}
    listed = [(numbers[path], offer, place) for path, offer, place in rows]
    file, offer, place = np.array(listed, np.int64).reshape(-1, 3).T
    differ = np.array(sorted(numbers[path] for path in spoilt), np.int64)
    return tuple(first[path] for path in paths), file, offer, place, differ
