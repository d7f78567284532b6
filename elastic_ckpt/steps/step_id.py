"""The identity of a saved step."""

from __future__ import annotations

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
