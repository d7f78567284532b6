"""The identity of a saved step, and the line of the run that the step belongs to.

A restored run continues under a new save, later than all earlier ones. Each manifest
lists the steps that its line was restored from (`Contents.parents`), so any manifest of
the newest save determines the run's abandoned steps in all tiers: the steps that the
run rolled back, or skipped as incomplete. An abandoned step is restored only if
requested by number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class StepId(NamedTuple):
    """Identifies a saved step by its training step and the particular save.

    After a rollback, a run saves some steps again, with different values.

    Attributes:
      save: the name of the save, greater (as a string) than all earlier names; empty if
        stock Orbax saved the step.
    """

    step: int
    save: str

    def __str__(self) -> str:
        """The name of the step directory on a RAM disk."""
        return f"{self.step}-{self.save}"

    @classmethod
    def parse(cls, name: str) -> StepId | None:
        """Parses a name that `__str__` returned; None for any other name."""
        step, _, save = name.partition("-")
        if not (step.isdecimal() and save) or "/" in save:
            return None
        parsed = cls(int(step), save)
        return parsed if str(parsed) == name else None

    def after(self, parents: Sequence[StepId]) -> tuple[StepId, ...]:
        """The parents of saves that continue from this step, which has `parents`."""
        return (*parents, self)[-_MOST_PARENTS:]


# Older restores are dropped from the list.
_MOST_PARENTS = 100
# The parents of a run that starts over, which abandons all earlier saves.
FROM_SCRATCH = (StepId(0, ""),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A save's ancestry.

    Attributes:
      parents: the steps at which the line continued under a later save, oldest first.
        The steps of a listed save, up to the listed step, belong to the line.
    """

    save: str
    parents: tuple[StepId, ...]

    def abandons(self, step_id: StepId) -> bool:
        """Whether a save of a step is older than the line and not part of it.

        Saves older than the first parent's are kept up to the first parent's step,
        because their own parents are unknown.
        """
        if step_id.save >= self.save or not self.parents:
            return False
        newest = {name: number for number, name in self.parents}
        if step_id.save in newest:
            return step_id.step > newest[step_id.save]
        first_step, first_save = self.parents[0]
        return step_id.save > first_save or step_id.step > first_step
