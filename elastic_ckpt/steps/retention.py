"""Retention: which steps a tier removes by a policy, and which it always keeps.

A policy is any object with Orbax's `should_preserve`: those of
`orbax.checkpoint.v1.training.preservation_policies` fit as they are (`LatestN`,
`EveryNSteps`, `EveryNSeconds`, `BestN`, `CustomSteps`, and `AnyPreservationPolicy` over
some of them). Orbax itself is not imported, because the sidecar does not have it.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from elastic_ckpt.core import errors
from elastic_ckpt.steps.step import StepId


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step in one tier, with the fields of Orbax's `PolicyCheckpointInfo`.

    Attributes:
      step: the training step.
      time_ms: when it was saved, since 1970.
      metrics: the values it is ranked by; None if it was not evaluated.
      complete: whether storage has all of it, or in RAM, whether the manifest of this
        host can be read; None if what would tell could not be read, so that it is kept.
      save: which save of it.
    """

    step: int
    time_ms: int
    metrics: dict[str, Any] | None
    complete: bool | None
    save: str = ""

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        return StepId(self.step, self.save)

    @property
    def time(self) -> datetime.datetime:
        """When it was saved, with a time zone."""
        return datetime.datetime.fromtimestamp(self.time_ms / 1000, datetime.UTC)


class PreservationPolicy(Protocol):
    """Decides which steps are kept; Orbax's policies have this interface."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Whether each of `checkpoints`, ordered by step, is kept."""
        ...


def steps_to_delete(
    held: Sequence[HeldStep],
    policy: PreservationPolicy,
    *,
    newest_complete: int | None,
    in_flight: Collection[int],
    preserved: Collection[int],
) -> list[int]:
    """The steps that a tier removes, oldest first.

    Independent of the policy, these stay: the newest step that is complete in this
    tier, the newest that is complete in all tiers together, all later steps (one of
    them may become complete), those of which too little could be read, and those in
    flight or preserved. The policy receives only complete steps, so that `LatestN(3)`
    keeps three that can be restored; older incomplete steps are removed.

    Args:
      held: the steps of the tier, without abandoned ones.
      policy: which complete steps to keep besides.
      newest_complete: by `search` over all tiers; None if there is none.
      in_flight: steps that are being written, uploaded, sent or read.
      preserved: by hand, or because another tier depends on them.
    """
    ordered = sorted(held, key=lambda step: step.step)
    whole = [step for step in ordered if step.complete]
    kept = set(in_flight) | set(preserved)
    kept |= {step.step for step in held if step.complete is None}
    if whole:
        flags = policy.should_preserve(whole, context=None)
        kept |= {step.step for step, keep in zip(whole, flags, strict=True) if keep}
        kept.add(whole[-1].step)
    return [
        step.step
        for step in ordered
        # Without a complete step nothing replaces these.
        if step.step not in kept and step.step < (newest_complete or 0)
    ]


@dataclasses.dataclass(frozen=True)
class BestN:
    """A preservation policy that keeps the `n` best steps by a metric.

    Unlike Orbax's policy of this name it does not keep every step that was never
    evaluated: one without the metric, or with NaN or infinity, is not among the best.
    Of steps with equal metrics the oldest is the best, so that a step is replaced by a
    better one only. A step is ranked once its metric is known; until then, other
    policies or a lease of the program that evaluates it keep it.

    Attributes:
      n: how many steps to keep.
      metric: the name of the metric, such as `eval_loss`.
      higher_is_better: True for an accuracy, False for a loss.

    Raises:
      ConfigError: if `n` is negative.
    """

    n: int
    _: dataclasses.KW_ONLY
    metric: str = "eval_loss"
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        if self.n < 0:
            raise errors.ConfigError(f"BestN({self.n}): give a number that is not < 0")

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any = None
    ) -> Sequence[bool]:
        """Whether each of `checkpoints`, in ascending order, is among the best."""
        del context
        ranks = [self.rank(each.metrics) for each in checkpoints]
        ordered = sorted(
            (rank, number) for number, rank in enumerate(ranks) if rank is not None
        )
        best = ordered[: self.n]
        return [(rank, number) in best for number, rank in enumerate(ranks)]

    def rank(self, metrics: Mapping[str, Any] | None) -> float | None:
        """The rank of a step, lower for a better one; None if it is not among them.

        Args:
          metrics: those of the step; None if it was not evaluated.
        """
        value: Any = (metrics or {}).get(self.metric)
        if type(value) not in (int, float) or not math.isfinite(value):
            return None
        return -value if self.higher_is_better else value


def best_step(
    checkpointer: Any, *, metric: str = "eval_loss", higher_is_better: bool = False
) -> int | None:
    """The best complete step by a metric that was saved with it or recorded later.

    Every process of the run calls it.

    Args:
      checkpointer: ours or Orbax's: its `checkpoints`, ascending, have a `step` and
        `metrics`, and are ranked.
      metric: the name of the metric.
      higher_is_better: True for an accuracy, False for a loss.

    Returns:
      The number of the step, the oldest of equal ones; None if no step has the metric
      as a finite number.

    Raises:
      CheckpointError: if steps have metrics, and none of them has this one.
    """
    policy = BestN(1, metric=metric, higher_is_better=higher_is_better)
    steps = checkpointer.checkpoints
    named = {name for each in steps for name in each.metrics or {}}
    if named and metric not in named:
        raise errors.CheckpointError(
            f"best_step: no step has the metric {metric!r}; they have {sorted(named)}"
        )
    best = policy.should_preserve(steps)
    return next(
        (e.step for e, is_best in zip(steps, best, strict=True) if is_best), None
    )


def with_evaluations(
    steps: Sequence[Any], evaluated: Mapping[int, Mapping[str, Any]]
) -> list[Any]:
    """Saved steps with the metrics that were recorded for them, before or after a save.

    Args:
      steps: ascending, dataclasses with `step` and `metrics`.
      evaluated: recorded metrics by training step: they count for the saved step of
        this number, otherwise for the newest before; the nearest counts.
    """
    ranked = []
    for each, after in itertools.zip_longest(steps, steps[1:]):
        counting = (
            n for n in evaluated if n >= each.step and (not after or n < after.step)
        )
        nearest = min(counting, default=-1)
        recorded, saved = evaluated.get(nearest, {}), each.metrics or {}
        first, last = (saved, recorded) if nearest == each.step else (recorded, saved)
        metrics = {**first, **last} or each.metrics
        ranked.append(dataclasses.replace(each, metrics=metrics))
    return ranked
