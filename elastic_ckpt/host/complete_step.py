"""A complete step, as hosts report it to the driver."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompleteStep:
    """A step that can be restored.

    Attributes:
      step: the training step.
      save: which save of it; empty if Orbax alone saved it.
      line: the steps, with their saves, from which later saves of its line went on,
        oldest first, and last this one.
      metrics: that it was saved with; None if there are none.
      custom_metadata: that a user added; None if there is nothing.
      commit_timestamp_nsecs: when it was committed, since 1970.
    """

    step: int
    save: str
    line: tuple[tuple[int, str], ...] = ()
    metrics: Any = dataclasses.field(default=None, compare=False)
    custom_metadata: Any = dataclasses.field(default=None, compare=False)
    commit_timestamp_nsecs: int | None = dataclasses.field(default=None, compare=False)

    def before(self) -> tuple[tuple[int, str], ...]:
        """Returns the parents of a save that replaces this step."""
        *parents, (step, save) = self.line
        return (*parents, (step - 1, save)) if step else tuple(parents)
