"""The identity of a saved step, and the line of a run that it belongs to.

A run that is restored goes on under a new save, later than all before. Each manifest
lists the steps from which the saves of its line went on (`Contents.parents`), so any
manifest of the newest save decides which steps of the run, in any tier, are abandoned:
those that the run has rolled back, or skipped because they were incomplete. An
abandoned step is restored only by its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


class StepId(NamedTuple):
    """A saved step: a training step, and which save of it.

    A run that goes back saves some of its steps again, with other values.

    Attributes:
      step: the number of the training step.
      save: the name of the save, greater as text than those of all saves before it;
        empty if Orbax alone saved the step.
    """

    step: int
    save: str

    def __str__(self) -> str:
        """The name of its directory in a RAM disk."""
        return f"{self.step}-{self.save}"

    @classmethod
    def parse(cls, name: str) -> StepId | None:
        """Parses what `str` returned; None for other names."""
        step, _, save = name.partition("-")
        if not (step.isdecimal() and save) or "/" in save:
            return None
        parsed = cls(int(step), save)
        return parsed if str(parsed) == name else None

    def after(self, parents: Sequence[StepId]) -> tuple[StepId, ...]:
        """The parents of saves that go on from this step, whose own are given."""
        return (*parents, self)[-_MOST_PARENTS:]


# Older restores are dropped from the list; saves from before them are kept.
_MOST_PARENTS = 100
# The parents of a run that is begun again: all saves before are abandoned.
FROM_SCRATCH = (StepId(0, ""),)


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
