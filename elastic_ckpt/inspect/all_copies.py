"""All copies of a step: reads each holder's copy in full and compares the digests.

Copies in persistent storage are also compared with what stock Orbax reads from them
(`persistent.orbax_view`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures

import numpy as np
from etils import epath

from elastic_ckpt.core import host_memory
from elastic_ckpt.core.errors import MOST_NAMED
from elastic_ckpt.inspect.problem import Kind, Problem
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import ComponentFile, Fragment
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.persistent import orbax_view
from elastic_ckpt.tiers.source import ReadError, Source

# Each thread holds one chunk in memory, and some copies of it while reading as Orbax.
_THREADS = 8
_ORBAX_REMEDY = (
    "Orbax alone cannot load the step; restore it with elastic_ckpt, and save it anew"
)


class AllCopies:
    """Every copy of one save of a step.

    Args:
      holdings: of the save.
      copies: the files of each holder.
      progress: called with the bytes read and the total, from any thread.

    Attributes:
      holdings: of the save.
      copies: the files of each holder.
      num_bytes: that were read, with the checksums behind values.
    """

    def __init__(
        self,
        holdings: Holdings,
        copies: Mapping[Offer, Source],
        progress: Callable[[int, int], None],
    ) -> None:
        self.holdings = holdings
        self.copies = copies
        self._progress = progress
        self._item = holdings.item
        # All hosts wrote into one directory.
        self._views = {
            directory: orbax_view.OrbaxView(epath.Path(directory), holdings.contents)
            for directory in dict.fromkeys(
                copies[each].directory
                for each in holdings.offers
                if each.tier == "persistent"
            )
        }
        self._sizes = _stored_bytes(holdings)
        self._total = int(self._sizes[self._item].sum())
        self._lock = threading.Lock()
        self.num_bytes = 0
        self._damaged: dict[int, str] = {}
        self._hidden: dict[int, str] = {}
        self._longer: dict[int, int] = {}

    def read(self) -> None:
        """Reads and compares all of them, in several threads."""
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
            shares = [
                range(first, len(self._item), _THREADS) for first in range(_THREADS)
            ]
            # Not a task for each of a million rows.
            for done in pool.map(self._read_share, shares):
                del done

    @property
    def damaged(self) -> dict[int, str]:
        """The rows of copies that cannot be used, and what is wrong with each."""
        return dict(self._damaged)

    @property
    def repairable(self) -> list[int]:
        """The rows of copies that differ in any way from what was saved."""
        return sorted({*self._damaged, *self._longer, *self._hidden})

    def problems(self) -> Iterator[Problem]:
        """The problems, by item and holder."""
        for row in sorted(self._damaged):
            yield self._problem(row, "damaged", self._damaged[row], self._remedy(row))
        for row in sorted(self._longer):
            saved_bytes = int(self._sizes[self._item[row]])
            why = f"is longer than what was saved, by {self._longer[row]} bytes"
            remedy = (
                f"a restore reads only its first {saved_bytes} bytes: cut it to them"
            )
            yield self._problem(row, "damaged", why, remedy)
        for row in sorted(self._hidden):
            yield self._problem(row, "orbax", self._hidden[row], _ORBAX_REMEDY)
        for item in self.holdings.diverged.tolist():
            yield self._diverged(item)
        held = self.holdings.offers[0].manifest
        for directory, view in self._views.items():
            for file, why in view.metadata_problems():
                yield Problem(
                    kind="orbax",
                    step=held.step,
                    save=held.save,
                    part=file,
                    tier="persistent",
                    path=f"{directory}/{file}",
                    why=why,
                    remedy=_ORBAX_REMEDY,
                )

    def _read_share(self, rows: range) -> None:
        memory = np.empty(0, np.uint8)
        for row in rows:
            size = int(self._sizes[self._item[row]])
            if memory.nbytes < size:
                memory = host_memory.allocate(size)
            damage, hidden, surplus = self._examine(row, memory[:size])
            with self._lock:
                if damage is not None:
                    self._damaged[row] = damage
                elif hidden is not None:
                    self._hidden[row] = hidden
                elif surplus > 0:
                    self._longer[row] = surplus
                self.num_bytes += size
                self._progress(self.num_bytes, self._total)

    def _examine(
        self, row: int, memory: np.ndarray
    ) -> tuple[str | None, str | None, int]:
        # The problem of the copy, that of Orbax's view of it, and the surplus bytes.
        offer, part = self.offer(row), self.part(row)
        is_chunk = isinstance(part, Fragment)
        place = (part.file, part.offset) if is_chunk else (part.path, 0)
        source, surplus = self.copies[offer], 0
        damage = hidden = None
        try:
            source.read_into(*place, memory.data)
            if self._is_whole_file(row, part):
                surplus = source.size(place[0]) - place[1] - memory.nbytes
        except ReadError as error:
            damage = str(error)
        else:
            damage = stored_part.damage(memory, part)
        view = self._views.get(self.copies[offer].directory)
        if is_chunk and view is not None:
            hidden = view.chunk_problem(part)
        return damage, hidden, surplus

    def _is_whole_file(self, row: int, part: Fragment | ComponentFile) -> bool:
        # The index of a store gives the end of values; its files may hold more.
        if isinstance(part, ComponentFile):
            return True
        offer = self.offer(row)
        held = offer.manifest.fragments
        return offer.tier == "local" and len(held.files) == len(held)

    def _problem(self, row: int, kind: Kind, why: str, remedy: str) -> Problem:
        offer, part = self.offer(row), self.part(row)
        file = part.file if isinstance(part, Fragment) else part.path
        item = int(self._item[row])
        return Problem(
            kind=kind,
            step=offer.manifest.step,
            save=offer.manifest.save,
            part=self.holdings.name(item),
            tier=offer.tier,
            holder=offer.host.id,
            path=f"{self.copies[offer].directory}/{file}",
            why=why,
            remedy=remedy,
        )

    def _remedy(self, row: int) -> str:
        item = int(self._item[row])
        first, end = self.holdings.first_row[item : item + 2].tolist()
        good = [each for each in range(first, end) if each not in self._damaged]
        if not good:
            directory = self.copies[self.offer(row)].directory
            return (
                "no good copy is left: restore an older step, and remove the directory"
                f" {directory}"
            )
        other = self.offer(good[0])
        holder = f"host {other.host.id}"
        if other.tier == "persistent":
            holder = "the persistent tier"
        if self.offer(row).tier == "persistent":
            return f"{holder} has a good copy: `elastic-ckpt verify --repair` takes it"
        return (
            f"{holder} has a good copy, and a restore that reads the bad one repairs it"
        )

    def _diverged(self, item: int) -> Problem:
        holders = self.holdings.holders(item)
        hosts = ", ".join(each.host.id for each in holders[:MOST_NAMED])
        more = f" and {len(holders) - MOST_NAMED} more" if holders[MOST_NAMED:] else ""
        held = holders[0].manifest
        return Problem(
            kind="diverged",
            step=held.step,
            save=held.save,
            part=self.holdings.name(item),
            why=f"the hosts {hosts}{more} saved different values",
            remedy="a device or memory of one of them is faulty: find it, and restore"
            " an older step",
        )

    def offer(self, row: int) -> Offer:
        """The holder of a row of the holdings."""
        return self.holdings.offers[self.holdings.holder[row]]

    def part(self, row: int) -> Fragment | ComponentFile:
        """The part of a row of the holdings, as its holder lists it."""
        if self._item[row] < len(self.holdings.leaf):
            return self.holdings.fragment(row)
        return self.offer(row).manifest.component_files[self.holdings.number[row]]


def _stored_bytes(holdings: Holdings) -> np.ndarray:
    # The size of each item with the checksum behind values, which some manifests omit.
    leaves = holdings.contents.leaves
    item_bytes = np.array([np.dtype(leaf.dtype).itemsize for leaf in leaves], np.int64)
    of_boxes = holdings.boxes.volumes * item_bytes[holdings.leaf]
    of_files = [file.stored_bytes for file in holdings.files]
    return np.concatenate(
        [of_boxes + layout.CHECKSUM_BYTES, np.array(of_files, np.int64)]
    )
