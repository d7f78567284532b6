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
      path: the directory that it has in persistent storage once it is backed up; None
        if there is no persistent tier.
      metrics: that it was saved with; None if there are none.
      custom_metadata: that a user added; None if there is nothing.
      commit_timestamp_nsecs: when it was committed, since 1970.
    """

    step: int
    save: str
    line: tuple[tuple[int, str], ...] = ()
    path: str | None = None
    metrics: Any = None
    custom_metadata: Any = None
    commit_timestamp_nsecs: int | None = None
