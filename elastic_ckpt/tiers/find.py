"""Finds steps in the tiers that this process can reach."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from elastic_ckpt.core import background, errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.search import Looked, Search
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.source import Offered, Source, SourceTier

_MOST_THREADS = 32
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class FoundStep:
    """A save of a step, and where to read it.

    Attributes:
      sources: one source per holder, in holder order.
    """

    table: StepTable
    sources: Sequence[Source]

    @property
    def step_id(self) -> StepId:
        """The step and the save."""
        return self.table.step_id

    @property
    def parents(self) -> tuple[StepId, ...]:
        """See `Contents.parents`."""
        return self.table.contents.parents

    @property
    def problem(self) -> str | None:
        """Why the save cannot be read; None if it is complete."""
        return None if self.table.complete else self.table.problem()


def search(
    tiers: Sequence[SourceTier],
    *,
    lines: Collection[Line] = (),
    without: Mapping[StepId, str] = types.MappingProxyType({}),
) -> Search[FoundStep]:
    """Prepares a search for steps in some tiers; see `steps.search`."""
    return Search(
        saves(tiers),
        lambda step: looked(offered(tiers, step)),
        lines=lines,
        without=without,
    )


def of_save(tiers: Sequence[SourceTier], step_id: StepId) -> FoundStep:
    """Finds a save of a step that another host found complete.

    Raises:
      CheckpointError: if this host cannot reach all parts of the step.
    """
    there = looked(offered(tiers, step_id.step))
    found = next((each for each in there.saves if each.step_id == step_id), None)
    if found is not None and found.problem is None:
        return found
    missing = f"step {step_id.step}, save {step_id.save}, is not reachable"
    problems = "; ".join([found.problem or "" if found else missing, *there.problems])
    raise errors.CheckpointError(
        f"{problems}; if other hosts can read the step, check this host's network"
    )


def of_each(tiers: Sequence[SourceTier], ask: Callable[[SourceTier], T]) -> list[T]:
    """Asks all tiers simultaneously, because a failed peer may respond slowly."""
    with background.pool(max(1, min(_MOST_THREADS, len(tiers))), "tiers") as pool:
        return list(pool.map(ask, tiers))


def saves(tiers: Sequence[SourceTier]) -> set[StepId]:
    """The saves that any tier knows; see `SourceTier.known_saves`."""
    return set().union(*of_each(tiers, lambda tier: tier.known_saves()))


def offered(tiers: Sequence[SourceTier], step: int) -> Offered:
    """The parts of a step in all tiers together."""
    several = of_each(tiers, lambda tier: tier.offers(step))
    return Offered(
        [held for each in several for held in each.held],
        [problem for each in several for problem in each.problems],
    )


def looked(there: Offered) -> Looked[FoundStep]:
    """The saves of a step that the tiers offer, newest first."""
    sources = {id(saved): source for saved, source in there.held}
    found = [
        FoundStep(StepTable(group), [sources[id(each)] for each in group])
        for group in manifest.grouped(saved for saved, _ in there.held)
    ]
    return Looked(found, there.problems)
