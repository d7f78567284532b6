"""What a checkpointer needs to know about the world of an elastic run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ckpt.tiers.persistent.claims import Claimant


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWorld:
    """A world of a run.

    Attributes:
      number: the number of the world; 0 if the run does not count its worlds.
      claimant: claims the world in persistent storage, at the latest before its first
        save; None does not claim it.
      is_left: whether the run continues in another world after the save that begins, or
        after the checkpointer is closed; the same on all hosts. Then a save goes only
        to RAM, and the next world makes its copies and its backup.
      loses_memory: whether some host's RAM is lost with this world; then its last save
        gets its copies before the world ends.
      await_check: called on each host when a save begins; raises an error if what this
        host has computed must not be saved.
    """

    number: int = 0
    claimant: Claimant | None = None
    is_left: Callable[[], bool] = lambda: False
    loses_memory: Callable[[], bool] = lambda: False
    await_check: Callable[[], object] = lambda: None


# The world of a run that has no others, or does not count them.
ALONE = RunWorld()
