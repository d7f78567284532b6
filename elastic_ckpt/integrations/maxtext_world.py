"""A host's MaxText in a world of an elastic run: when it leaves.

MaxText asks at the end of each step whether it is about to be preempted; the answer is
whether this world is left.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.elastic.world import World


class Leaving:
    """Answers MaxText's question, on a host of `world`.

    Args:
      world: that this process has joined.

    Attributes:
      last_step: of the run, which is not left; set before the first step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # The newest step that MaxText asked about, and the answer.
        self._asked = (-1, False)
        self.last_step = -1

    def reached_preemption(self, checkpoint_manager: Any, step: int) -> bool:
        """Whether all hosts save this step and leave; MaxText asks several times.

        The last step ends the run, and is not left.
        """
        del checkpoint_manager
        if step != self._asked[0] and step != self.last_step:
            self._asked = (step, self._world.should_stop(step))
        return self._asked[1]
