"""What a checkpointer must know about an elastic run's world."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ckpt.tiers.persistent.claims import Claimant


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWorld:
    """A world of a run.

    Attributes:
      number: the number of the world; 0 if the run does not count its worlds.
      claimant: the start that claims the world in persistent storage, at the latest
        before the first save; None if nothing claims it.
      is_left: a function that returns whether the run continues in another world after
        the save that begins, or after the checkpointer is closed; the same on all
        hosts. Then a save goes only to RAM, and the next world makes its copies and its
        backup.
      loses_memory: whether any host's RAM is lost with this world; then the last save
        gets its copies before the world ends.
      await_check: a function called on each host when a save begins; raises an error if
        this host's results must not be saved.
    """

    number: int = 0
    claimant: Claimant | None = None
    is_left: Callable[[], bool] = lambda: False
    loses_memory: Callable[[], bool] = lambda: False
    await_check: Callable[[], object] = lambda: None


# The world of a run that has no other worlds, or does not count them.
ALONE = RunWorld()
