"""Verification: every byte of every copy of a step is read and compared.

A restore reads one good copy of each item. A verification reads the copy of every
holder, with the CRC-32C behind its values, because a bad copy is lost redundancy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from elastic_ckpt.inspect import all_copies
from elastic_ckpt.inspect.copy_repair import CopyRepair, Repair
from elastic_ckpt.inspect.problem import Problem
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import search
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.tiers.persistent.persistent_tier import StepSource
from elastic_ckpt.tiers.source import Source

State = Literal["complete", "incomplete", "unverifiable"]


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
      problems: in the order of the steps; what does not matter for `passed` is here. If
        copies were repaired, those that are left.
      repairs: the copies that were repaired, or could not be; none without `repair`.
    """

    steps: tuple[VerifiedStep, ...]
    problems: tuple[Problem, ...]
    repairs: tuple[Repair, ...] = ()

    def passed(self, *, strict: bool) -> bool:
        """Whether all is well.

        Args:
          strict: whether steps that cannot be verified count as bad.
        """
        return not any(strict or each.kind != "unverifiable" for each in self.problems)


def verify(
    locations: Locations,
    steps: Collection[int],
    *,
    progress: Callable[[int, int], None],
    repair: bool = False,
) -> Verification:
    """Reads and compares all copies of some steps in some locations.

    Args:
      locations: together.
      steps: their numbers.
      progress: called with the bytes of a step read and the total, from any thread.
      repair: whether bad copies are put right from good ones, and read once more.
    """
    repairs: list[Repair] = []
    verified: list[VerifiedStep] = []
    problems: list[Problem] = []
    for number in sorted(steps):
        if number in locations.foreign_steps:
            verified.append(_foreign(number))
            problems.append(_unverifiable(number, locations.foreign_steps[number]))
        copies, unread = locations.look(number)
        problems += [_spoilt(number, why) for why in unread]
        groups = list(search.steps(list(copies)))
        whole = any(step.complete for step in groups)
        for step in reversed(groups):
            reading = _read(step, copies, progress)
            if repair:
                reading = _repaired(step, reading, repairs, progress)
            problems += reading.problems()
            verified.append(_summary(step, num_bytes=reading.num_bytes))
        # One complete save is enough; without one, the last save counts.
        if groups and not whole:
            problems += _incomplete(groups[0])
    return Verification(
        steps=tuple(verified), problems=tuple(problems), repairs=tuple(repairs)
    )


def _read(
    step: search.Step,
    copies: Mapping[Offer, Source],
    progress: Callable[[int, int], None],
) -> all_copies.AllCopies:
    reading = all_copies.AllCopies(step.holdings, copies, progress)
    reading.read()
    return reading


def _repaired(
    step: search.Step,
    reading: all_copies.AllCopies,
    repairs: list[Repair],
    progress: Callable[[int, int], None],
) -> all_copies.AllCopies:
    # Reads again what was repaired: it passes as any other copy, or stays a problem.
    outcomes: dict[tuple[str, str], Repair] = {}
    for rewrite in (False, True):
        if not reading.repairable:
            break
        done = list(CopyRepair(reading).run(rewrite=rewrite))
        outcomes.update({(each.tier, each.path): each for each in done})
        if all(each.problem for each in done):
            break
        copies = {
            offer: source.reopened() if isinstance(source, StepSource) else source
            for offer, source in reading.copies.items()
        }
        reading = _read(step, copies, progress)
    repairs += outcomes.values()
    return reading


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
        # It has diverged, which is reported by item.
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
        remedy="save through ec.Checkpointer to have digests",
    )
