"""A survey: which steps are in which tiers, who holds them, and what could be lost.

A survey reads only manifests; `verification` compares the values with their digests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_ckpt.core.errors import MOST_NAMED
from elastic_ckpt.inspect import step_components
from elastic_ckpt.inspect.step_components import StepComponent
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import search
from elastic_ckpt.steps.coverage import coverage
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.tiers.source import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierOfStep:
    """The part of a save of a step that one tier holds.

    Attributes:
      tier: `local` (the memory of all hosts) or `persistent`.
      problem: what is wrong with it there; None if all of it is there.
      holders: the ids of the hosts whose manifests are there, ordered.
      num_bytes: of all copies.
    """

    tier: str
    problem: str | None
    holders: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyedStep:
    """A save of a step.

    Attributes:
      step: its number.
      save: which save of it; empty if Orbax alone saved it.
      problem: what is wrong with it in all tiers together; None if it is complete.
      preserved: whether it is preserved by hand, as far as it can be seen.
      abandoned: whether the run went on without it, from an earlier step.
      parent: the step, with its save, from which the run went on under this save; None
        of the first one.
      tiers: that have something of it.
      components: its parts; none of an incomplete step.
    """

    step: int
    save: str
    problem: str | None
    preserved: bool
    abandoned: bool
    parent: tuple[int, str] | None
    tiers: tuple[TierOfStep, ...]
    components: tuple[StepComponent, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The items that are lost with one failure domain.

    Attributes:
      name: of the domain.
      num_items: boxes and files that are lost.
      first: names of the first of them.
    """

    name: str
    num_items: int
    first: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveredStep:
    """The items of a step that survive the loss of any one failure domain of a kind.

    Attributes:
      step: its number.
      save: which save of it.
      domain: the kind, such as `slice`.
      num_domains: of this kind that hold something in memory.
      num_items: boxes and files of the step.
      num_survivors: of these, that outlast the loss of any one.
      losses: of the domains that take something with them.
    """

    step: int
    save: str
    domain: str
    num_domains: int
    num_items: int
    num_survivors: int
    losses: tuple[Loss, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncommittedStep:
    """A part of a step that is not committed: it is being written, or was interrupted.

    Attributes:
      step: its number.
      path: of the directory.
    """

    step: int
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """The result of a survey.

    Attributes:
      known: the numbers of all steps of which there may be something, ascending.
      steps: that were looked at, ascending by step and save.
      coverage: of one step, by kind of failure domain; empty if none is complete.
      leftovers: what is not committed: it is being written, or was cut short.
      problems: manifests that cannot be had.
    """

    known: tuple[int, ...]
    steps: tuple[SurveyedStep, ...]
    coverage: tuple[CoveredStep, ...]
    leftovers: tuple[UncommittedStep, ...]
    problems: tuple[str, ...]


def survey(
    locations: Locations,
    domains: Sequence[str],
    *,
    step: int | None,
    newest_only: bool = False,
) -> Survey:
    """Looks at the steps of some locations.

    Args:
      locations: together.
      domains: kinds of failure domains, whose loss is looked at: that of the newest
        complete step, or of `step`.
      step: the only one to look at; None for all.
      newest_only: whether the newest complete one is enough, with those after it.
    """
    surveyed: list[SurveyedStep] = []
    problems: list[str] = []
    covered: tuple[CoveredStep, ...] = ()
    preserved = set(locations.preserved())
    known = sorted({*locations.steps, *locations.foreign_steps})
    # Newest first, so that no more is read than it takes.
    for number in reversed(known):
        if step not in (None, number) or (newest_only and covered):
            continue
        of_number = []
        is_preserved = number in preserved
        if number in locations.foreign_steps:
            of_number.append(_foreign(number, preserved=is_preserved))
        copies, unread = locations.look(number)
        problems += unread
        newest: tuple[CoveredStep, ...] = ()
        for offers in reversed(search.saves(list(copies))):
            examined = search.Step.from_offers(offers)
            abandoned = locations.line.abandons(examined.step_id)
            of_number.append(
                _surveyed(examined, copies, preserved=is_preserved, abandoned=abandoned)
            )
            is_asked = step == number or not abandoned
            if examined.complete and is_asked and not covered:
                newest = tuple(_covered(examined, domain) for domain in domains)
        covered = covered or newest
        surveyed = [*of_number, *surveyed]
    if not known:
        # Locations that cannot be read have no steps, either.
        _, problems = locations.look(step or 0)
    return Survey(
        known=tuple(known),
        steps=tuple(surveyed),
        coverage=covered,
        leftovers=tuple(
            UncommittedStep(step=each.step, path=str(each.path))
            for each in locations.leftovers()
        ),
        # A peer that fails does so at every step.
        problems=tuple(dict.fromkeys(problems)),
    )


def _surveyed(
    step: search.Step,
    copies: Mapping[Offer, Source],
    *,
    preserved: bool,
    abandoned: bool,
) -> SurveyedStep:
    offers = step.holdings.offers
    parents = step.holdings.contents.parents
    tiers = []
    for tier in sorted({each.tier for each in offers}):
        held = [each for each in offers if each.tier == tier]
        alone = search.Step.from_offers(held)
        tiers.append(
            TierOfStep(
                tier=tier,
                problem=None if alone.complete else alone.lacking(),
                holders=tuple(sorted(each.host.id for each in held)),
                num_bytes=sum(each.manifest.stored_bytes for each in held),
            )
        )
    return SurveyedStep(
        step=step.step,
        save=step.save,
        problem=None if step.complete else step.lacking(),
        preserved=preserved,
        abandoned=abandoned,
        parent=parents[-1] if parents else None,
        tiers=tuple(tiers),
        components=step_components.components(step, copies) if step.complete else (),
    )


def _foreign(step: int, *, preserved: bool) -> SurveyedStep:
    tier = TierOfStep(tier="persistent", problem=None, holders=(), num_bytes=0)
    return SurveyedStep(
        step=step,
        save="",
        problem=None,
        preserved=preserved,
        abandoned=False,
        parent=None,
        tiers=(tier,),
    )


def _covered(step: search.Step, domain: str) -> CoveredStep:
    covered = coverage(step.holdings, domain)
    return CoveredStep(
        step=step.step,
        save=step.save,
        domain=domain,
        num_domains=len(covered.lost),
        num_items=step.holdings.num_items,
        num_survivors=covered.num_survivors,
        losses=tuple(
            Loss(
                name=name,
                num_items=len(items),
                first=tuple(map(step.holdings.name, items[:MOST_NAMED].tolist())),
            )
            for name, items in covered.lost.items()
            if len(items)
        ),
    )
