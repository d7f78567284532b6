"""Finds steps in tiers that this process can reach."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.search import Looked, Search
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.source import Copy, Offered, Source, Tier


@dataclasses.dataclass(frozen=True, eq=False)
class FoundStep:
    """A save of a step, and where to read it.

    Attributes:
      table: its parts and their holders.
      sources: of the holders, in their order.
    """

    table: StepTable
    sources: Sequence[Source]

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> FoundStep:
        """The step that some holders have parts of."""
        table = StepTable([each.manifest for each in copies])
        return cls(table, [each.source for each in copies])

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        return self.table.step_id

    @property
    def parents(self) -> tuple[StepId, ...]:
        """See `Contents.parents`."""
        return self.table.contents.parents

    @property
    def problem(self) -> str | None:
        """Why it cannot be read; None if it is complete."""
        return None if self.table.complete else self.table.problem()


def search(
    tiers: Sequence[Tier],
    *,
    lines: Collection[Line] = (),
    without: Mapping[StepId, str] = types.MappingProxyType({}),
) -> Search[FoundStep]:
    """A search for steps in some tiers; see `steps.search`."""
    return Search(
        {step for tier in tiers for step in tier.steps()},
        {save for tier in tiers for save in tier.known_saves()},
        lambda step: looked(offered(tiers, step)),
        lines=lines,
        without=without,
    )


def of_save(tiers: Sequence[Tier], step_id: StepId) -> FoundStep:
    """The save of a step that another host found to be complete.

    Raises:
      CheckpointError: if it is not complete by what this host can reach.
    """
    found = looked(offered(tiers, step_id.step))
    why = f" ({'; '.join(found.problems)})" if found.problems else ""
    for each in found.saves:
        if each.step_id == step_id:
            if each.problem is None:
                return each
            raise errors.CheckpointError(
                f"{each.problem}, as far as this host can reach{why}; look at its"
                " network"
            )
    raise errors.CheckpointError(
        f"step {step_id.step}, save {step_id.save}, is not reachable from this"
        f" host{why}; look at its network"
    )


def offered(tiers: Sequence[Tier], step: int) -> Offered:
    """What some tiers have of a step."""
    several = [tier.offers(step) for tier in tiers]
    return Offered(
        [copy for each in several for copy in each.copies],
        [problem for each in several for problem in each.problems],
    )


def looked(there: Offered) -> Looked[FoundStep]:
    """The saves of a step that tiers have, the newest first."""
    sources = {id(each.manifest): each for each in there.copies}
    groups = manifest.grouped(each.manifest for each in there.copies)
    found = [FoundStep.of([sources[id(each)] for each in group]) for group in groups]
    return Looked(found, there.problems)
