"""Retention determines which steps a tier removes and which it always keeps.

A policy is any object with Orbax's `should_preserve` method. All policies in
`orbax.checkpoint.v1.training.preservation_policies` work unchanged: `LatestN`,
`EveryNSteps`, `EveryNSeconds`, `BestN`, `CustomSteps`, and combinations with
`AnyPreservationPolicy`. This module does not import Orbax, which the sidecar lacks.
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
class TierStep:
    """A step in one tier, with the fields of Orbax's `PolicyCheckpointInfo`.

    Attributes:
      time_ms: when the step was saved, in milliseconds since 1970.
      metrics: the values that the step is ranked by; None if it was not evaluated.
      complete: in storage, whether the whole step is there; in RAM, whether this host's
        manifest is readable. None if this is unknown; the step is then kept.
    """

    step: int
    time_ms: int
    metrics: dict[str, Any] | None
    complete: bool | None
    save: str = ""

    @property
    def step_id(self) -> StepId:
        """The step and the save."""
        return StepId(self.step, self.save)

    @property
    def time(self) -> datetime.datetime:
        """When the step was saved, in UTC."""
        return datetime.datetime.fromtimestamp(self.time_ms / 1000, datetime.UTC)


class PreservationPolicy(Protocol):
    """Decides which steps are kept; Orbax's policies have this interface."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Whether each of `checkpoints`, ordered by step, is kept."""
        ...


def steps_to_delete(
    held: Sequence[TierStep],
    policy: PreservationPolicy,
    *,
    newest_complete: int | None,
    in_flight: Collection[int],
    preserved: Collection[int],
) -> list[int]:
    """The steps that a tier removes, oldest first.

    Regardless of the policy, these stay: the newest step that is complete in this tier;
    the newest step that is complete in all tiers together, and all later steps, which
    may still become complete; steps whose completeness is unknown; and steps that are
    in flight or preserved. The policy sees only complete steps, so `LatestN(3)` keeps
    three steps that can be restored. Older incomplete steps are removed.

    Args:
      held: the tier's steps, without abandoned steps.
      policy: the policy that determines which other complete steps to keep.
      newest_complete: the newest step that is complete in all tiers together; None if
        there is none.
      in_flight: steps that are being written, uploaded, sent or read.
      preserved: steps that are pinned, or that another tier depends on.
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
        # If no step is complete, nothing can replace the incomplete ones.
        if step.step not in kept and step.step < (newest_complete or 0)
    ]


@dataclasses.dataclass(frozen=True)
class BestN:
    """A preservation policy that keeps the `n` best steps by a metric.

    Unlike Orbax's policy of this name, this policy does not keep every step that was
    never evaluated: a step whose metric is missing, NaN or infinite is not among the
    best. Among steps with the same metrics, the oldest wins, so only a better step
    replaces a kept step. Until a step's metric is known, only other policies or the
    evaluating program's lease keep the step.

    Attributes:
      n: the number of steps to keep.
      metric: the name of the metric, such as `eval_loss`.
      higher_is_better: whether higher is better: True for accuracy, False for loss.

    Raises:
      ConfigError: if `n` is negative.
    """

    n: int
    _: dataclasses.KW_ONLY
    metric: str = "eval_loss"
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        if self.n < 0:
            raise errors.ConfigError(f"BestN({self.n}): n must be at least 0")

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any = None
    ) -> Sequence[bool]:
        """Whether each of `checkpoints`, ordered by step, is among the best."""
        del context
        ranks = [self.rank(each.metrics) for each in checkpoints]
        ordered = sorted(
            (rank, number) for number, rank in enumerate(ranks) if rank is not None
        )
        best = ordered[: self.n]
        return [(rank, number) in best for number, rank in enumerate(ranks)]

    def rank(self, metrics: Mapping[str, Any] | None) -> float | None:
        """A step's rank, where lower is better; None if it has no finite metric."""
        value: Any = (metrics or {}).get(self.metric)
        if type(value) not in (int, float) or not math.isfinite(value):
            return None
        return -value if self.higher_is_better else value


def best_step(
    checkpointer: Any, *, metric: str = "eval_loss", higher_is_better: bool = False
) -> int | None:
    """The best complete step by a metric that was saved with it or recorded later.

    Every process of the run must call this.

    Args:
      checkpointer: a checkpointer of this library or of Orbax, whose `checkpoints` have
        `metrics`.
      metric: the name of the metric.
      higher_is_better: whether higher is better: True for accuracy, False for loss.

    Returns:
      The step number, the oldest among equals; None if no step has a finite value.

    Raises:
      CheckpointError: if steps have metrics, but no step has this metric.
    """
    policy = BestN(1, metric=metric, higher_is_better=higher_is_better)
    steps = checkpointer.checkpoints
    named = {name for each in steps for name in each.metrics or {}}
    if named and metric not in named:
        raise errors.CheckpointError(
            f"best_step: no step has the metric {metric!r}; the steps have"
            f" {sorted(named)}"
        )
    best = policy.should_preserve(steps)
    return next(
        (e.step for e, is_best in zip(steps, best, strict=True) if is_best), None
    )


def with_evaluations(
    steps: Sequence[Any], evaluated: Mapping[int, Mapping[str, Any]]
) -> list[Any]:
    """Adds recorded metrics to saved steps.

    Args:
      steps: dataclasses with `step` and `metrics`, in ascending order.
      evaluated: recorded metrics by training step. They apply to the saved step with
        that number or, if there is none, to the newest step before it. If more than one
        entry applies to a step, the nearest is used.
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
