"""Verification: every byte of every copy of a step is read and compared.

A restore is content with one good copy of each item. Here each holder's is read, with
the CRC-32C behind its values, for the copies that are bad now are those that will be
missed later. Of steps in persistent storage it is also looked at what stock Orbax will
read (`persistent.orbax_view`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Literal

import google_crc32c
import numpy as np
from etils import epath

from elastic_ckpt.core import digest, host_memory
from elastic_ckpt.tiers import layout, search
from elastic_ckpt.tiers.holdings import Holdings, Offer
from elastic_ckpt.tiers.manifest import ComponentFile, Fragment
from elastic_ckpt.tiers.persistent import orbax_view
from elastic_ckpt.tiers.places import Copy, Places
from elastic_ckpt.tiers.source import ReadError

# Of each a chunk is in memory, where it reads what Orbax reads some copies of it.
_THREADS = 8
_NAMED = 5

Kind = Literal["damaged", "diverged", "incomplete", "manifest", "orbax", "unverifiable"]
State = Literal["complete", "incomplete", "unverifiable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with a step.

    Attributes:
      kind: `damaged`, a copy is not what was saved; `diverged`, holders saved different
        values; `incomplete`, nobody has a part; `manifest`, one cannot be read;
        `orbax`, the values are there and Orbax will not find them; `unverifiable`,
        there are no digests.
      step: its number.
      save: which save of it; empty where that is not known.
      part: a leaf and box, or a file; empty if it is the step as a whole.
      tier: of the holder, `local` or `persistent`; empty if it is not about one.
      holder: the id of the host whose manifest it is; empty likewise.
      path: of the bad file, or of the step.
      why: what is wrong.
      remedy: what to do.
    """

    kind: Kind
    step: int
    save: str = ""
    part: str = ""
    tier: str = ""
    holder: str = ""
    path: str = ""
    why: str
    remedy: str

    def __str__(self) -> str:
        subject = f"step {self.step}"
        if self.part:
            subject += f", {self.part}"
        if self.holder:
            subject += f", {self.tier} tier, host {self.holder}"
        where = f" ({self.path})" if self.path else ""
        return f"{subject}{where}: {self.why}; {self.remedy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedStep:
    """A save of a step that was looked at.

    Attributes:
      step: its number.
      save: which save of it; empty if Orbax alone saved it.
      state: `complete`, in all places together; `incomplete`; `unverifiable`.
      num_copies: items at holders that were read.
      num_bytes: of these, with the checksums behind values.
    """

    step: int
    save: str
    state: State
    num_copies: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
      steps: that were looked at, ascending by step and save.
      problems: in the order of the steps; what does not matter for `passed` is here.
    """

    steps: tuple[VerifiedStep, ...]
    problems: tuple[Problem, ...]

    def passed(self, *, strict: bool) -> bool:
        """Whether all is well.

        Args:
          strict: whether steps that cannot be verified count as bad.
        """
        return not any(strict or each.kind != "unverifiable" for each in self.problems)


def verify(
    places: Places,
    steps: Collection[int],
    *,
    progress: Callable[[int, int], None],
) -> Verification:
    """Reads all that some places have of some steps.

    Args:
      places: together.
      steps: their numbers.
      progress: hears how many bytes of how many of a step were read, in some thread.
    """
    verified: list[VerifiedStep] = []
    problems: list[Problem] = []
    for number in sorted(steps):
        if number in places.foreign_steps:
            verified.append(_foreign(number))
            problems.append(_unverifiable(number, places.foreign_steps[number]))
        copies, unread = places.look(number)
        problems += [_spoilt(number, why) for why in unread]
        groups = [search.Step.of(each) for each in search.saves(list(copies))]
        whole = any(step.complete for step in groups)
        for step in reversed(groups):
            reading = _Reading(step.holdings, copies, progress)
            reading.run()
            problems += reading.problems()
            verified.append(_summary(step, num_bytes=reading.num_bytes))
        # Of several saves one that is complete will do, and of others the last counts.
        if groups and not whole:
            problems += _incomplete(groups[0])
    return Verification(steps=tuple(verified), problems=tuple(problems))


class _Reading:
    # Reads every copy of one save of a step, in several threads.

    def __init__(
        self,
        holdings: Holdings,
        copies: Mapping[Offer, Copy],
        progress: Callable[[int, int], None],
    ) -> None:
        self._holdings = holdings
        self._copies = copies
        self._progress = progress
        self._item = holdings.item
        # All hosts wrote into one directory.
        self._views = {
            where: orbax_view.OrbaxView(epath.Path(where), holdings.contents)
            for where in dict.fromkeys(
                copies[each].where
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

    def run(self) -> None:
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
            shares = [
                range(first, len(self._item), _THREADS) for first in range(_THREADS)
            ]
            # Not a task for each of a million rows.
            for done in pool.map(self._read_share, shares):
                del done

    def problems(self) -> Iterator[Problem]:
        """What was found, by item and holder."""
        for row in sorted(self._damaged):
            yield self._problem(row, "damaged", self._damaged[row])
        for row in sorted(self._hidden):
            yield self._problem(row, "orbax", self._hidden[row])
        for item in self._holdings.diverged.tolist():
            yield self._diverged(item)
        held = self._holdings.offers[0].manifest
        for where, view in self._views.items():
            for file, why in view.metadata_problems():
                yield Problem(
                    kind="orbax",
                    step=held.step,
                    save=held.save,
                    part=file,
                    tier="persistent",
                    path=f"{where}/{file}",
                    why=why,
                    remedy=_ORBAX_REMEDY,
                )

    def _read_share(self, rows: range) -> None:
        memory = np.empty(0, np.uint8)
        for row in rows:
            size = int(self._sizes[self._item[row]])
            if memory.nbytes < size:
                memory = host_memory.allocate(size)
            damage, hidden = self._examine(row, memory[:size])
            with self._lock:
                if damage is not None:
                    self._damaged[row] = damage
                elif hidden is not None:
                    self._hidden[row] = hidden
                self.num_bytes += size
                self._progress(self.num_bytes, self._total)

    def _examine(self, row: int, memory: np.ndarray) -> tuple[str | None, str | None]:
        offer, part = self._offer(row), self._part(row)
        is_chunk = isinstance(part, Fragment)
        place = (part.file, part.offset) if is_chunk else (part.path, 0)
        damage = hidden = None
        try:
            self._copies[offer].source.read_into(*place, memory.data)
        except ReadError as error:
            damage = str(error)
        else:
            damage = _damage(memory, part)
        view = self._views.get(self._copies[offer].where)
        if is_chunk and view is not None:
            hidden = view.chunk_problem(part)
        return damage, hidden

    def _problem(self, row: int, kind: Kind, why: str) -> Problem:
        offer, part = self._offer(row), self._part(row)
        file = part.file if isinstance(part, Fragment) else part.path
        item = int(self._item[row])
        return Problem(
            kind=kind,
            step=offer.manifest.step,
            save=offer.manifest.save,
            part=self._holdings.name(item),
            tier=offer.tier,
            holder=offer.host.id,
            path=f"{self._copies[offer].where}/{file}",
            why=why,
            remedy=_ORBAX_REMEDY if kind == "orbax" else self._remedy(row),
        )

    def _remedy(self, row: int) -> str:
        item = int(self._item[row])
        first, end = self._holdings.first_row[item : item + 2].tolist()
        good = [each for each in range(first, end) if each not in self._damaged]
        if not good:
            return "no good copy is left: restore an older step, and remove this one"
        other = self._offer(good[0])
        holder = f"host {other.host.id}"
        if other.tier == "persistent":
            holder = "the persistent tier"
        if self._offer(row).tier == "persistent":
            return f"{holder} has a good copy: save a newer step before that is lost"
        return (
            f"{holder} has a good copy, and a restore that meets the bad one puts it"
            " right"
        )

    def _diverged(self, item: int) -> Problem:
        holders = self._holdings.holders(item)
        hosts = ", ".join(each.host.id for each in holders[:_NAMED])
        more = f" and {len(holders) - _NAMED} more" if holders[_NAMED:] else ""
        held = holders[0].manifest
        return Problem(
            kind="diverged",
            step=held.step,
            save=held.save,
            part=self._holdings.name(item),
            why=f"the hosts {hosts}{more} saved different values",
            remedy="a device or memory of one of them is faulty: find it, and restore"
            " an older step",
        )

    def _offer(self, row: int) -> Offer:
        return self._holdings.offers[self._holdings.holder[row]]

    def _part(self, row: int) -> Fragment | ComponentFile:
        if self._item[row] < len(self._holdings.leaf):
            return self._holdings.fragment(row)
        return self._offer(row).manifest.component_files[self._holdings.number[row]]


_DIFFERS = "is not what was saved: its digest differs"
_ORBAX_REMEDY = (
    "Orbax alone cannot load the step; restore it with elastic_ckpt, and save it anew"
)


def _stored_bytes(holdings: Holdings) -> np.ndarray:
    # Of each item, with the checksum behind values, which not all manifests count.
    leaves = holdings.contents.leaves
    item_bytes = np.array([np.dtype(leaf.dtype).itemsize for leaf in leaves], np.int64)
    of_boxes = holdings.boxes.volumes * item_bytes[holdings.leaf]
    of_files = [file.stored_bytes for file in holdings.files]
    return np.concatenate(
        [of_boxes + layout.CHECKSUM_BYTES, np.array(of_files, np.int64)]
    )


def _damage(stored: np.ndarray, part: Fragment | ComponentFile) -> str | None:
    if isinstance(part, ComponentFile):
        return None if digest.values_digest(stored) == part.digest else _DIFFERS
    values, checksum = np.split(stored, [len(stored) - layout.CHECKSUM_BYTES])
    if digest.values_digest(values) != part.digest:
        return _DIFFERS
    if google_crc32c.value(values) != int.from_bytes(checksum.tobytes(), "little"):
        return (
            "has right values, and a wrong CRC-32C behind them: zarr readers refuse it"
        )
    return None


def _summary(step: search.Step, *, num_bytes: int) -> VerifiedStep:
    return VerifiedStep(
        step=step.step,
        save=step.save,
        state="complete" if step.complete else "incomplete",
        num_copies=len(step.holdings.holder),
        num_bytes=num_bytes,
    )


def _incomplete(step: search.Step) -> Sequence[Problem]:
    if not (step.gaps or step.missing_parts):
        # It has diverged, which is told by item.
        return []
    return [
        Problem(
            kind="incomplete",
            step=step.step,
            save=step.save,
            why=step.lacking(),
            remedy="look where the other holders are as well (more paths, --peer), or"
            " restore another step",
        )
    ]


def _spoilt(step: int, why: str) -> Problem:
    what, _, remedy = why.rpartition("; ")
    return Problem(
        kind="manifest",
        step=step,
        why=what or why,
        remedy=remedy if what else "what it lists counts as lost",
    )


def _foreign(step: int) -> VerifiedStep:
    return VerifiedStep(
        step=step, save="", state="unverifiable", num_copies=0, num_bytes=0
    )


def _unverifiable(step: int, path: str) -> Problem:
    return Problem(
        kind="unverifiable",
        step=step,
        tier="persistent",
        path=path,
        why="Orbax saved it without digests, and nothing was compared",
        remedy="save through a checkpointer with a local tier to have digests",
    )
