"""The facts about an elastic run's world that a checkpointer needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ckpt.tiers.persistent.claims import Claimant


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWorld:
    """A world of a run.

    Attributes:
      number: the world number; 0 if the run does not count its worlds.
      claimant: the claimant of the world in persistent storage, which must claim it
        before the first save; None if the world is not claimed.
      is_leaving_world: a function that returns whether the run continues in another
        world after the current save or after the checkpointer is closed. The result is
        the same on all hosts. If it is true, a save goes only to RAM, and the next
        world makes the step's copies and backup.
      loses_memory: a function that returns whether any host's RAM is lost with this
        world. If it is true, copies of the last save are made before the world ends.
      await_check: a function called on each host when a save begins; it raises an error
        if this host's results must not be saved.
    """

    number: int = 0
    claimant: Claimant | None = None
    is_leaving_world: Callable[[], bool] = lambda: False
    loses_memory: Callable[[], bool] = lambda: False
    await_check: Callable[[], object] = lambda: None


# The world of a run that has only one world or does not count its worlds.
ALONE = RunWorld()
