"""Verification: reads and checks every byte of every copy of a step.

A restore reads one good copy of each item. A verification reads every holder's copy,
including the CRC-32C after the values, because each bad copy reduces redundancy. Copies
in storage are also compared with the values that stock Orbax reads
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
# Called from any thread with the number of bytes read so far and the total of a step.
OnBytes = Callable[[int, int], None]

# Each thread has one chunk in memory, plus copies of it while it reads as Orbax does.
_THREADS = 8
_ORBAX_REMEDY = (
    "stock Orbax cannot load the step; restore it with elastic_ckpt, then save it again"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem with a step.

    Attributes:
      kind: the kind of problem. `damaged`: a copy differs from the saved values;
        `diverged`: holders saved different values; `incomplete`: a part is not at any
        holder; `manifest`: a manifest cannot be read; `orbax`: the values exist, but
        Orbax cannot load them; `unverifiable`: there are no digests.
      step: the step number.
      save: the ID of the save; empty if unknown.
      part: the leaf and box, or the file; empty for the step as a whole.
      tier: the tier of the bad copy, `local` or `persistent`; empty if the problem does
        not concern a single copy.
      holder: the ID of the host that has the bad copy; empty when `tier` is.
      path: the bad file, or the step directory.
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
    """A verified save of a step.

    Attributes:
      step: the step number.
      save: the ID of the save; empty if stock Orbax saved the step.
      state: `complete` if all locations together have all of it, otherwise `incomplete`
        or `unverifiable`.
      num_copies: the number of copies of the step's items that were read.
      num_bytes: the size of these copies, including the checksums after the values.
    """

    step: int
    save: str
    state: Literal["complete", "incomplete", "unverifiable"]
    num_copies: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification.

    Attributes:
      steps: the saves that were read, ordered by step and save.
      problems: all problems in step order, even problems that `passed` ignores.
    """

    steps: tuple[VerifiedStep, ...]
    problems: tuple[Problem, ...]

    def passed(self, *, strict: bool) -> bool:
        """Whether there are no problems; ignores unverifiable steps unless `strict`."""
        return not any(strict or each.kind != "unverifiable" for each in self.problems)


def verify(
    locations: Locations, steps: Collection[int], *, progress: OnBytes
) -> Verification:
    """Reads and compares all copies of `steps` in all `locations` together."""
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
                    why="Orbax saved no digests, so nothing was compared",
                    remedy="save through ec.Checkpointer to get digests",
                )
            )
        looked = locations.look(number)
        for problem in looked.problems:
            what, _, remedy = problem.rpartition("; ")
            problems.append(
                Problem(
                    kind="manifest",
                    step=number,
                    why=what or problem,
                    remedy=remedy if what else "the copies that it lists are lost",
                )
            )
        for found in reversed(looked.saves):
            copies = _Copies(found, progress)
            problems += copies.problems()
            verified.append(
                VerifiedStep(
                    step=number,
                    save=found.step_id.save,
                    state="complete" if found.table.complete else "incomplete",
                    num_copies=len(found.table.item),
                    num_bytes=copies.num_bytes,
                )
            )
        # One complete save is enough; without one, the last save is reported. If it has
        # diverged, each item reports that.
        tables = [found.table for found in looked.saves]
        if tables and tables[0].gaps and not any(each.complete for each in tables):
            problems.append(
                Problem(
                    kind="incomplete",
                    step=number,
                    save=tables[0].step_id.save,
                    why=tables[0].lacking(),
                    remedy="search more holders (add paths or --secret-file), or"
                    " restore a different step",
                )
            )
    return Verification(steps=tuple(verified), problems=tuple(problems))


class _Copies:
    """All copies of one save of a step, read and compared in multiple threads.

    Attributes:
      num_bytes: the number of bytes read.
    """

    def __init__(self, found: FoundStep, progress: OnBytes) -> None:
        self._table, self._sources = table, sources = found.table, found.sources
        self._progress, self.num_bytes = progress, 0
        # The problem of each bad copy, by the copy's row in the table. If it has no
        # remedy, the copy cannot be used, but another copy may be good.
        self._bad: dict[int, Problem] = {}
        # One view per directory, because multiple hosts wrote into the same one.
        self._views = {
            source.directory: orbax_view.OrbaxView(epath.Path(source.directory))
            for holder, source in zip(table.holders, sources, strict=True)
            if holder.tier == "persistent"
        }
        # The size of each copy, with the checksum after values.
        is_file = np.array([leaf.is_file for leaf in table.contents.leaves], bool)
        behind = np.where(is_file[table.items.leaf], 0, layout.CHECKSUM_BYTES)
        self._sizes = (table.num_bytes + behind)[table.item]
        self._lock = threading.Lock()
        rows = range(len(table.item))
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
            # One task per thread, not one for each of a million rows.
            list(pool.map(self._read, [rows[n::_THREADS] for n in range(_THREADS)]))

    def problems(self) -> Iterator[Problem]:
        """The problems, ordered by item and holder."""
        table, (step, save) = self._table, self._table.step_id
        # Copies that cannot be used come first.
        for row, bad in sorted(
            self._bad.items(), key=lambda each: (each[1].remedy != "", each[0])
        ):
            yield dataclasses.replace(bad, remedy=bad.remedy or self._elsewhere(row))
        for item in table.diverged.tolist():
            hosts = [table.holders[each].host.id for each in table.holders_of(item)]
            yield Problem(
                kind="diverged",
                step=step,
                save=save,
                part=table.name(item),
                why=f"hosts {errors.first_of(hosts)} saved different values",
                remedy="a device or memory on one of these hosts is faulty: find it,"
                " then restore an older step",
            )
        for directory, view in self._views.items():
            for file, why in view.problems(table.contents):
                yield Problem(
                    kind="orbax",
                    step=step,
                    save=save,
                    part=file,
                    tier="persistent",
                    path=f"{directory}/{file}",
                    why=why,
                    remedy=_ORBAX_REMEDY,
                )

    def _read(self, rows: range) -> None:
        memory = host_memory.allocate(int(self._sizes[rows].max(initial=0)))
        total = int(self._sizes.sum())
        for row in rows:
            size = int(self._sizes[row])
            bad = self._checked(row, memory[:size])
            with self._lock:
                self._bad |= {} if bad is None else {row: bad}
                self.num_bytes += size
                self._progress(self.num_bytes, total)

    def _checked(self, row: int, memory: np.ndarray) -> Problem | None:
        table, item = self._table, int(self._table.item[row])
        leaf, box, named = table.leaf(item), table.box(item), table.digest_at(row)
        source, holder = self._sources[table.holder[row]], self._holder(row)
        view = None if leaf.is_file else self._views.get(source.directory)
        file = layout.part_file(leaf, box)
        if view is not None:
            file = f"{leaf.checkpointable}//{ocdbt.key(leaf, box)}"
        problem = functools.partial(
            Problem,
            step=table.step_id.step,
            save=table.step_id.save,
            part=table.name(item),
            tier=holder.tier,
            holder=holder.host.id,
            path=f"{source.directory}/{file}",
        )
        try:
            surplus = source.read_into(leaf, box, memory.data) - memory.nbytes
            why = stored_part.damage(memory, leaf, named)
        except ReadError as error:
            surplus, why = 0, str(error)
        if why is not None:
            return problem(kind="damaged", why=why, remedy="")
        if view is not None:
            why = view.chunk_problem(leaf, box, named)
        if why is not None:
            return problem(kind="orbax", why=why, remedy=_ORBAX_REMEDY)
        if surplus <= 0:
            return None
        return problem(
            kind="damaged",
            why=f"is {surplus} bytes longer than the saved copy",
            remedy=f"a restore reads only its first {memory.nbytes} bytes: truncate it"
            " to that size",
        )

    def _elsewhere(self, row: int) -> str:
        # The remedy for a copy that cannot be used: where a good copy is.
        first, end = self._table.first_row[self._table.item[row] :][:2].tolist()
        good = [
            self._holder(each)
            for each in range(first, end)
            if each not in self._bad or self._bad[each].remedy
        ]
        if not good:
            return (
                "no good copy is left: restore an older step, then remove the directory"
                f" {self._sources[self._table.holder[row]].directory}"
            )
        holder = f"host {good[0].host.id}"
        if good[0].tier == "persistent":
            holder = "the persistent tier"
        remedy = "a good copy, and a restore that reads the bad one repairs it"
        if self._holder(row).tier == "persistent":
            remedy = "a good copy: restore the step, then save it again"
        return f"{holder} has {remedy}"

    def _holder(self, row: int) -> Holder:
        return self._table.holders[self._table.holder[row]]
