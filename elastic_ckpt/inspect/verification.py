"""Verification: every byte of every copy of a step is read and compared.

A restore reads one good copy of each item. A verification reads the copy of every
holder, with the CRC-32C behind its values, because a bad copy is lost redundancy.
Copies in persistent storage are also compared with what stock Orbax reads from them
(`persistent.orbax_view`).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from typing import Literal

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, host_memory
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Holder
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.persistent import ocdbt, orbax_view
from elastic_ckpt.tiers.source import ReadError

Kind = Literal["damaged", "diverged", "incomplete", "manifest", "orbax", "unverifiable"]
State = Literal["complete", "incomplete", "unverifiable"]
# Called with the bytes of a step read and the total, from any thread.
OnBytes = Callable[[int, int], None]

# Each thread holds one chunk in memory, and some copies of it while reading as Orbax.
_THREADS = 8
_ORBAX_REMEDY = (
    "Orbax alone cannot load the step; restore it with elastic_ckpt, and save it anew"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a step.

    Attributes:
      kind: `damaged`, a copy is not what was saved; `diverged`, holders saved different
        values; `incomplete`, no holder has a part; `manifest`, a manifest cannot be
        read; `orbax`, the values exist but Orbax cannot load them; `unverifiable`,
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
        part = f", {self.part}" if self.part else ""
        holder = f", {self.tier} tier, host {self.holder}" if self.holder else ""
        location = f" ({self.path})" if self.path else ""
        return f"step {self.step}{part}{holder}{location}: {self.why}; {self.remedy}"


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
    """The result of a verification.

    Attributes:
      steps: that were read, ascending by step and save.
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
    locations: Locations, steps: Collection[int], *, progress: OnBytes
) -> Verification:
    """Reads and compares all copies of some steps in some locations.

    Args:
      locations: together.
      steps: their numbers.
      progress: called with the bytes of a step read and the total, from any thread.
    """
    verified: list[VerifiedStep] = []
    problems: list[Problem] = []
    for number in sorted(steps):
        if number in locations.foreign_steps:
            verified.append(
                VerifiedStep(
                    step=number,
                    save="",
                    state="unverifiable",
                    num_copies=0,
                    num_bytes=0,
                )
            )
            problems.append(
                Problem(
                    kind="unverifiable",
                    step=number,
                    tier="persistent",
                    path=locations.foreign_steps[number],
                    why="Orbax saved it without digests, and nothing was compared",
                    remedy="save through ec.Checkpointer to have digests",
                )
            )
        looked = locations.look(number)
        problems += [_of_manifest(number, why) for why in looked.problems]
        for found in reversed(looked.saves):
            read = _Copies(found, progress)
            problems += read.problems()
            verified.append(read.summary())
        # One complete save is enough; without one, the last save counts. If it has
        # diverged, that is reported by item.
        tables = [found.table for found in looked.saves]
        if tables and tables[0].gaps and not any(each.complete for each in tables):
            problems.append(
                Problem(
                    kind="incomplete",
                    step=number,
                    save=tables[0].step_id.save,
                    why=tables[0].lacking(),
                    remedy="look where the other holders are as well (more paths,"
                    " --secret-file), or restore another step",
                )
            )
    return Verification(steps=tuple(verified), problems=tuple(problems))


def _of_manifest(step: int, why: str) -> Problem:
    what, _, remedy = why.rpartition("; ")
    return Problem(
        kind="manifest",
        step=step,
        why=what or why,
        remedy=remedy if what else "what it lists counts as lost",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fault:
    """What is wrong with one copy.

    Attributes:
      kind: of the problem.
      why: the end of a sentence.
      remedy: what to do; None if the copy cannot be used, and another may be good.
    """

    kind: Literal["damaged", "orbax"]
    why: str
    remedy: str | None


class _Copies:
    """Every copy of one save of a step, read and compared in several threads.

    Args:
      found: the save.
      progress: called with the bytes read and the total, from any thread.

    Attributes:
      faults: of copies, by their rows in the table.
    """

    def __init__(self, found: FoundStep, progress: OnBytes) -> None:
        self.faults: dict[int, _Fault] = {}
        self._table = table = found.table
        self._sources = found.sources
        self._progress = progress
        self._item = table.item
        # All hosts wrote into one directory.
        directories = dict.fromkeys(
            source.directory
            for holder, source in zip(table.holders, found.sources, strict=True)
            if holder.tier == "persistent"
        )
        self._views = {
            directory: orbax_view.OrbaxView(epath.Path(directory))
            for directory in directories
        }
        # Of each item, with the checksum behind values.
        is_array = np.array([not leaf.is_file for leaf in table.contents.leaves], bool)
        behind = layout.CHECKSUM_BYTES * is_array[table.items.leaf]
        self._sizes = table.num_bytes + behind
        self._total = int(self._sizes[self._item].sum())
        self._num_bytes = 0
        self._lock = threading.Lock()
        rows = range(len(self._item))
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
            # Not a task for each of a million rows.
            list(pool.map(self._read, [rows[n::_THREADS] for n in range(_THREADS)]))

    def summary(self) -> VerifiedStep:
        """What was read."""
        return VerifiedStep(
            step=self._table.step_id.step,
            save=self._table.step_id.save,
            state="complete" if self._table.complete else "incomplete",
            num_copies=len(self._item),
            num_bytes=self._num_bytes,
        )

    def problems(self) -> Iterator[Problem]:
        """The problems, by item and holder."""
        step, save = self._table.step_id
        of_step = functools.partial(Problem, step=step, save=save)
        unusable = [row for row in self.faults if self.faults[row].remedy is None]
        for row in [*sorted(unusable), *sorted(self.faults.keys() - set(unusable))]:
            fault, holder = self.faults[row], self._holder(row)
            yield of_step(
                kind=fault.kind,
                part=self._table.name(int(self._item[row])),
                tier=holder.tier,
                holder=holder.host.id,
                path=self._path(row),
                why=fault.why,
                remedy=fault.remedy or self._elsewhere(row),
            )
        for item in self._table.diverged.tolist():
            holders = self._table.holders_of(item)
            hosts = [self._table.holders[each].host.id for each in holders]
            yield of_step(
                kind="diverged",
                part=self._table.name(item),
                why=f"the hosts {errors.first_of(hosts)} saved different values",
                remedy="a device or memory of one of them is faulty: find it, and"
                " restore an older step",
            )
        for directory, view in self._views.items():
            for file, why in [
                *orbax_view.problems(epath.Path(directory)),
                *view.empty_problems(self._table.contents),
            ]:
                yield of_step(
                    kind="orbax",
                    part=file,
                    tier="persistent",
                    path=f"{directory}/{file}",
                    why=why,
                    remedy=_ORBAX_REMEDY,
                )

    def _read(self, rows: range) -> None:
        memory = np.empty(0, np.uint8)
        for row in rows:
            size = int(self._sizes[self._item[row]])
            if memory.nbytes < size:
                memory = host_memory.allocate(size)
            fault = self._examined(row, memory[:size])
            with self._lock:
                if fault is not None:
                    self.faults[row] = fault
                self._num_bytes += size
                self._progress(self._num_bytes, self._total)

    def _examined(self, row: int, memory: np.ndarray) -> _Fault | None:
        table, item = self._table, int(self._item[row])
        leaf, box, named = table.leaf(item), table.box(item), table.digest_at(row)
        source, surplus = self._sources[table.holder[row]], 0
        try:
            source.read_into(leaf, box, memory.data)
            surplus = source.size(leaf, box) - memory.nbytes
            why = stored_part.damage(memory, leaf, named)
        except ReadError as error:
            why = str(error)
        if why is not None:
            return _Fault(kind="damaged", why=why, remedy=None)
        view = self._views.get(source.directory)
        if view is not None and not leaf.is_file:
            hidden = view.chunk_problem(leaf, box, named)
            if hidden is not None:
                return _Fault(kind="orbax", why=hidden, remedy=_ORBAX_REMEDY)
        if surplus > 0:
            return _Fault(
                kind="damaged",
                why=f"is longer than what was saved, by {surplus} bytes",
                remedy=f"a restore reads only its first {memory.nbytes} bytes: cut it"
                " to them",
            )
        return None

    def _elsewhere(self, row: int) -> str:
        directory = self._sources[self._table.holder[row]].directory
        good = self._good(row)
        if not good:
            return (
                "no good copy is left: restore an older step, and remove the directory"
                f" {directory}"
            )
        holder = f"host {self._holder(good[0]).host.id}"
        if self._holder(good[0]).tier == "persistent":
            holder = "the persistent tier"
        if self._holder(row).tier == "persistent":
            return f"{holder} has a good copy: restore the step, and save it anew"
        return (
            f"{holder} has a good copy, and a restore that reads the bad one repairs it"
        )

    def _good(self, row: int) -> list[int]:
        # The rows of the same item that can be used.
        first, end = self._table.first_row[self._item[row] :][:2].tolist()
        return [
            each
            for each in range(first, end)
            if each not in self.faults or self.faults[each].remedy is not None
        ]

    def _holder(self, row: int) -> Holder:
        return self._table.holders[self._table.holder[row]]

    def _path(self, row: int) -> str:
        item = int(self._item[row])
        leaf, box = self._table.leaf(item), self._table.box(item)
        file = layout.part_file(leaf, box)
        if self._holder(row).tier == "persistent" and not leaf.is_file:
            file = f"{leaf.part}//{ocdbt.key(leaf, box)}"
        return f"{self._sources[self._table.holder[row]].directory}/{file}"
