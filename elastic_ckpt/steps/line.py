"""The line of a run: which saves led to its newest one, and which were abandoned.

A run that is restored goes on under a new save, later than all before. Each manifest
lists the steps from which the saves of its line went on (`Contents.parents`), so any
manifest of the newest save decides which steps of the run, in any tier, are abandoned:
those that the run has rolled back, or skipped because they were incomplete. An
abandoned step is restored only by its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from elastic_ckpt.steps.step_id import StepId

# Older restores are dropped from the list; saves from before them are kept.
MOST_PARENTS = 100
# The parents of a run that is begun again: all saves before are abandoned.
FROM_SCRATCH: tuple[StepId, ...] = (StepId(0, ""),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The saves that led to one save.

    Attributes:
      save: the newest of them.
      parents: the steps, with their saves, from which later saves of the line went on,
        oldest first. The steps of a listed save, up to the listed one, are of the line.
    """

    save: str
    parents: tuple[StepId, ...]

    @classmethod
    def from_fields(cls, save: str, parents: Iterable[Sequence[Any]]) -> Line:
        """Makes a line from its JSON fields."""
        return cls(
            save=save, parents=tuple(StepId(step, name) for step, name in parents)
        )

    def abandons(self, step_id: StepId) -> bool:
        """Whether a save of a step is older than the line and not part of it.

        Saves older than the first parent's are kept up to that step, because their own
        parents are unknown.
        """
        if step_id.save >= self.save or not self.parents:
            return False
        newest = {name: number for number, name in self.parents}
        if step_id.save in newest:
            return step_id.step > newest[step_id.save]
        first_step, first_save = self.parents[0]
        return step_id.save > first_save or step_id.step > first_step


def after(step_id: StepId, parents: Sequence[StepId]) -> tuple[StepId, ...]:
    """The parents of saves that go on from a step.

    Args:
      step_id: the step.
      parents: of that save.
    """
    return (*parents, step_id)[-MOST_PARENTS:]
