"""The world of an elastic run, as a checkpointer has to know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elastic_ckpt.tiers.persistent.claims import Claimant


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWorld:
    """A world among those of a run.

    Attributes:
      number: of the world; 0 if the run does not count its worlds.
      claimant: who claims the world in persistent storage, at the latest before its
        first save; None claims none.
      is_left: whether the run goes on in another world after the save that begins, or
        after the end of the checkpointer; the same on all hosts. Then a save goes to
        RAM, and its copies and its backup are left to the next world.
      loses_memory: whether some host's RAM is lost with this world; then its last save
        has its copies before the world ends.
      await_check: called when a save begins, on each host; raises an error if what this
        host has computed must not be saved.
    """

    number: int = 0
    claimant: Claimant | None = None
    is_left: Callable[[], bool] = lambda: False
    loses_memory: Callable[[], bool] = lambda: False
    await_check: Callable[[], object] = lambda: None


# A world of a run that has no others, or does not count them.
ALONE = RunWorld()
