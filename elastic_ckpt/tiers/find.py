"""Finding a step: asks the tiers, newest step first, until one is complete.

`search` decides from given manifests; this module fetches them, and only as many as it
needs. A step in storage that a later version of elastic_ckpt wrote ends the search with
an error, since an older step would abandon it; such a step in RAM is passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps import search
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.source import Offered, Source, Tier, merged

_UNKNOWN = Line(save="", parents=())
# A broken peer may list hundreds of saves that it does not have.
_MOST_TRIED = 300
_NO_MANIFEST = "has no manifest that can be read"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoundStep:
    """A complete step, and where to read it.

    Attributes:
      step: its parts and their holders.
      sources: of all holders.
    """

    step: search.Step
    sources: Mapping[Offer, Source]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """The result of a search: a complete step, and the problems of newer ones.

    Attributes:
      found_step: None if no step is complete.
      passed_over: by step, newest first, what is wrong with those that are newer.
    """

    found_step: FoundStep | None
    passed_over: Mapping[int, str]


class Search:
    """A search for steps in some tiers.

    Abandoned steps (see `line`) are found only by their numbers.

    Args:
      tiers: to search.
      lines: that no manifest contains: the caller's, and those recorded in storage.
      without: steps and saves that proved to be unreadable.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        lines: Collection[Line] = (),
        without: Collection[StepId] = (),
    ) -> None:
        self._tiers = tiers
        self._without = frozenset(without)
        # The offers that were read to find the line; usually the requested step is
        # among them.
        self._looked_at: dict[int, Offered] = {}
        self.line = max([*lines, self._line()], key=lambda line: line.save)

    def newest(self, *, before: int | None = None) -> Outcome:
        """The newest step that is complete in all tiers together.

        Args:
          before: looks only at steps with a lower number.
        """
        passed_over: dict[int, str] = {}
        found_step: FoundStep | None = None
        for number in self._steps()[::-1]:
            if before is not None and number >= before:
                continue
            outcome = self._look(number, abandoned=False)
            found_step = outcome.found_step
            if found_step is not None:
                break
            passed_over |= outcome.passed_over
        return Outcome(found_step=found_step, passed_over=passed_over)

    def complete_steps(self) -> list[FoundStep]:
        """The steps that are complete, ascending."""
        looks = []
        for step in self._steps():
            with contextlib.suppress(checked_json.LaterVersionError):
                looks.append(self._look(step, abandoned=False).found_step)
        return [each for each in looks if each is not None]

    def lacks(self, step: int) -> bool:
        """Whether all tiers can be read, and none has anything of `step`."""
        return step not in self._steps() and not _offers(self._tiers, step).problems

    def of_step(self, step: int) -> FoundStep:
        """The complete save of `step`, the last of several.

        An abandoned one is taken if there is no other.

        Raises:
          CheckpointError: if there is none; the message names the missing parts and the
            step to restore instead.
        """
        looks = [self._look(step, abandoned=each) for each in (False, True)]
        for each in looks:
            if each.found_step is not None:
                return each.found_step
        problem = next(why for each in looks for why in each.passed_over.values())
        instead = self.newest().found_step
        way_out = "no step is complete"
        if instead is not None:
            number = instead.step.step
            way_out = f"newest complete step is {number}; restore it with step={number}"
        raise errors.CheckpointError(f"{problem}; {way_out}")

    def _steps(self) -> list[int]:
        return sorted({each for tier in self._tiers for each in tier.steps()})

    def _line(self) -> Line:
        saves = {each for tier in self._tiers for each in tier.known_saves()}
        newest = sorted(saves, key=lambda each: (each[1], each[0]), reverse=True)
        for step, save in newest[:_MOST_TRIED]:
            if step not in self._looked_at:
                self._looked_at[step] = _offers(self._tiers, step)
            for offer in self._looked_at[step].sources:
                if offer.manifest.save == save:
                    parents = offer.manifest.contents.parents
                    return Line(save=save, parents=parents)
        return _UNKNOWN

    def _look(self, step: int, *, abandoned: bool) -> Outcome:
        # Looks for the saves of one step; the problem is missing if there are none.
        offered = self._looked_at.get(step) or _offers(self._tiers, step)
        sources, problems = offered
        of_line = [
            offer
            for offer in sources
            if self.line.abandons(offer.manifest.step_id) == abandoned
        ]
        offers = [
            offer for offer in of_line if offer.manifest.step_id not in self._without
        ]
        incomplete: list[search.Step] = []
        for examined in search.steps(offers):
            if examined.complete:
                return Outcome(
                    found_step=FoundStep(step=examined, sources=sources),
                    passed_over={},
                )
            incomplete.append(examined)
        passed_over: dict[int, str] = {}
        if of_line or not (sources or abandoned):
            why = "proved to be unreadable" if of_line else _NO_MANIFEST
            lacking = [each.problem() for each in incomplete] or [f"step {step} {why}"]
            passed_over[step] = "; ".join(lacking) + _in_parentheses(problems)
        return Outcome(found_step=None, passed_over=passed_over)


def of_save(tiers: Sequence[Tier], step_id: StepId) -> FoundStep:
    """Returns the save of a step that another host found to be complete.

    Raises:
      CheckpointError: if it is not complete by what this host can reach.
    """
    sources, problems = _offers(tiers, step_id.step)
    offers = [offer for offer in sources if offer.manifest.save == step_id.save]
    if not offers:
        raise errors.CheckpointError(
            f"step {step_id.step}, save {step_id.save}, is not reachable from this host"
            f"{_in_parentheses(problems)}; look at its network"
        )
    examined = search.Step.from_offers(offers)
    if not examined.complete:
        raise errors.CheckpointError(
            f"{examined.problem()}, as far as this host can reach"
            f"{_in_parentheses(problems)}; look at its network"
        )
    return FoundStep(step=examined, sources=sources)


def _offers(tiers: Sequence[Tier], step: int) -> Offered:
    return merged(tier.offers(step) for tier in tiers)


def _in_parentheses(problems: Sequence[str]) -> str:
    return f" ({'; '.join(problems)})" if problems else ""
