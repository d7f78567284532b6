"""The step to which a run goes back when a callback has found a divergence. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.config.divergence_section import DivergenceSection
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


def choose(
    finding: Finding,
    saved: Sequence[int],
    *,
    rollbacks: int,
    section: DivergenceSection,
    began_at: int = 0,
    first_due: int = 0,
) -> int:
    """The step to go back to.

    If no step is left that was saved two steps before the first bad one, that is the
    step right before it: its state is good if the batch was bad. If this has failed, or
    there is none, it is step 0, the initial state, unless an older step was saved once
    and is gone.

    Args:
      finding: what a callback has found.
      saved: the steps that are complete.
      rollbacks: how often the run has gone back before.
      section: how far to go back, and how often.
      began_at: the step at which the run began, or to which it went back last.
      first_due: the first step that a run saves; 0 if it cannot begin anew.

    Raises:
      DivergedError: if it has gone back too often, or no good step is left.
    """
    most = section.divergence_max_rollbacks
    if rollbacks >= most:
        raise errors.DivergedError(
            f"{finding.why}, and the run has gone back {rollbacks} times"
            f" (divergence_max_rollbacks={most}); look for the cause, or raise it"
        )
    margin = section.divergence_rollback_steps
    step = good_step(saved, since=finding.since, margin=margin)
    if step is None:
        has_failed = rollbacks > 0 and began_at == finding.since - 1
        before = [] if has_failed else saved
        step = good_step(before, since=finding.since + 1, margin=margin)
    if step is None and first_due and finding.since - 2 - margin < first_due:
        step = 0
    if step is None:
        raise errors.DivergedError(
            f"{finding.why}, and no step from before that is left to go back to; the"
            f" complete steps are {list(saved) or 'none'}. Keep more steps, or older"
            " ones, or save more often"
        )
    return step
