"""Finding a step: asks the tiers, newest step first, until one is complete.

`search` decides by manifests that are there; here they are fetched, and no more of them
than it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import search
from elastic_ckpt.tiers.holdings import Offer
from elastic_ckpt.tiers.source import Source, Tier


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoundStep:
    """A complete step, and where to read it.

    Attributes:
      step: what it consists of, and who has that.
      sources: of all holders.
    """

    step: search.Step
    sources: Mapping[Offer, Source]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What was found, and why nothing newer.

    Attributes:
      found: None if no step is complete.
      passed_over: by step, newest first, what is wrong with those that are newer.
    """

    found: FoundStep | None
    passed_over: Mapping[int, str]


def newest(
    tiers: Sequence[Tier], *, without: Collection[tuple[int, str]] = ()
) -> Outcome:
    """The newest step that is complete in all tiers together.

    Args:
      tiers: where to look.
      without: steps and saves that proved to be unreadable.
    """
    passed_over: dict[int, str] = {}
    for number in sorted({each for tier in tiers for each in tier.steps()})[::-1]:
        outcome = _look(tiers, number, without)
        if outcome.found is not None:
            return Outcome(found=outcome.found, passed_over=passed_over)
        passed_over.update(outcome.passed_over)
    return Outcome(found=None, passed_over=passed_over)


def of_step_or_none(tiers: Sequence[Tier], step: int) -> FoundStep | None:
    """The complete save of `step`, the last of several; None if there is none."""
    return _look(tiers, step, ()).found


def of_step(
    tiers: Sequence[Tier], step: int, *, without: Collection[tuple[int, str]] = ()
) -> FoundStep:
    """The complete save of `step`, the last of several.

    Raises:
      CheckpointError: if there is none; the message says what is missing, and which
        step to restore instead.
    """
    outcome = _look(tiers, step, without)
    if outcome.found is not None:
        return outcome.found
    problem = outcome.passed_over.get(step, f"step {step} is nowhere")
    instead = newest(tiers, without=without).found
    way_out = "no step is complete"
    if instead is not None:
        number = instead.step.step
        way_out = f"newest complete step is {number}; restore it with step={number}"
    raise errors.CheckpointError(f"{problem}; {way_out}")


def of_save(tiers: Sequence[Tier], step: int, save: str) -> FoundStep:
    """That very save of a step, which another host found to be complete.

    Raises:
      CheckpointError: if it is not complete by what this host can reach.
    """
    sources, problems = _offers(tiers, step)
    offers = [offer for offer in sources if offer.manifest.save == save]
    if not offers:
        raise errors.CheckpointError(
            f"step {step}, save {save}, is not reachable from this host"
            f"{_told(problems)}; look at its network"
        )
    found = search.Step.of(offers)
    if not found.complete:
        raise errors.CheckpointError(
            f"{found.problem()}, as far as this host can reach{_told(problems)}; look"
            " at its network"
        )
    return FoundStep(step=found, sources=sources)


def _look(
    tiers: Sequence[Tier], step: int, without: Collection[tuple[int, str]]
) -> Outcome:
    sources, problems = _offers(tiers, step)
    offers = [
        offer for offer in sources if (step, offer.manifest.save) not in set(without)
    ]
    found = search.search(offers)
    if found.newest is not None:
        return Outcome(
            found=FoundStep(step=found.newest, sources=sources), passed_over={}
        )
    lacking = [each.problem() for each in found.incomplete]
    if not lacking:
        lacking = [f"step {step} has no manifest that can be read"]
        if len(offers) < len(sources):
            lacking = [f"step {step} proved to be unreadable"]
    told = "; ".join(lacking) + _told(problems)
    return Outcome(found=None, passed_over={step: told})


def _offers(tiers: Sequence[Tier], step: int) -> tuple[dict[Offer, Source], list[str]]:
    sources: dict[Offer, Source] = {}
    problems: list[str] = []
    for tier in tiers:
        offered = tier.offers(step)
        sources.update(offered.sources)
        problems.extend(offered.problems)
    return sources, problems


def _told(problems: Sequence[str]) -> str:
    return f" ({'; '.join(problems)})" if problems else ""
