"""The step to which a run goes back when a callback has found a divergence. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.training.callbacks import Finding


def good_step(saved: Sequence[int], *, since: int, margin: int = 0) -> int | None:
    """The newest saved step from before a divergence; None if there is none.

    The loss of step n is that of the state after n - 1 steps. So the state after
    `since` - 1 steps may be bad, and the one before it is good.

    Args:
      saved: the steps that are complete.
      since: the first bad step, counted from 1.
      margin: how many steps to leave out before that.
    """
    good = [step for step in saved if step <= since - 2 - margin]
    return max(good, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollbacks:
    """How far and how often a run goes back.

    Attributes:
      most: how often it does at most.
      margin: how many steps to leave out before a divergence.
      first_due: the first step that the run saves; 0 if it cannot begin anew.
    """

    most: int = 3
    margin: int = 0
    first_due: int = 0

    def choose(
        self, finding: Finding, saved: Sequence[int], *, before: int, began_at: int = 0
    ) -> int:
        """The step to go back to.

        If no step is left that was saved two steps before the first bad one, that is
        the step right before it: its state is good if the batch was bad. If this has
        failed, or there is none, it is step 0, the initial state, unless an older step
        was saved once and is gone.

        Args:
          finding: what a callback has found.
          saved: the steps that are complete.
          before: how often the run has gone back before.
          began_at: the step at which the run began, or to which it went back last.

        Raises:
          DivergedError: if it has gone back too often, or no good step is left.
        """
        if before >= self.most:
            raise errors.DivergedError(
                f"{finding.why}, and the run has gone back {before} times"
                f" (divergence_max_rollbacks={self.most}); look for the cause, or raise"
                " it"
            )
        margin = self.margin
        step = good_step(saved, since=finding.since, margin=margin)
        if step is None:
            has_failed = before > 0 and began_at == finding.since - 1
            older = [] if has_failed else saved
            step = good_step(older, since=finding.since + 1, margin=margin)
        if step is None and 0 < self.first_due > finding.since - 2 - margin:
            step = 0
        if step is None:
            raise errors.DivergedError(
                f"{finding.why}, and no step from before that is left to go back to;"
                f" the complete steps are {list(saved) or 'none'}. Keep more steps, or"
                " older ones, or save more often"
            )
        return step
