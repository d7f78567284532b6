"""The best steps by a metric: their names, and a preservation policy beside Orbax's.

Unlike Orbax's `BestN` it ranks NaN and infinite metrics behind all others, and it does
not keep every step that was never evaluated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors


@dataclasses.dataclass(frozen=True)
class BestN:
    """A preservation policy that keeps the `n` best steps by a metric.

    A step without the metric, or with NaN or infinity, is not among the best. Of steps
    with equal metrics the oldest is the best, so that a step is replaced by a better
    one only. A step is ranked once its metric is known; until then, other policies or a
    lease of the program that evaluates it keep it.

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
        best = {number for _, number in ordered[: self.n]}
        return [number in best for number in range(len(checkpoints))]

    def rank(self, metrics: Mapping[str, Any] | None) -> float | None:
        """The rank of a step, lower for a better one; None if it is not among them.

        Args:
          metrics: those of the step; None if it was not evaluated.
        """
        value = (metrics or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
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
        nearest = min(
            (n for n in evaluated if n >= each.step and (not after or n < after.step)),
            default=None,
        )
        if nearest is None:
            ranked.append(each)
            continue
        recorded, saved = dict(evaluated[nearest]), dict(each.metrics or {})
        is_own = nearest == each.step
        metrics = {**saved, **recorded} if is_own else {**recorded, **saved}
        ranked.append(dataclasses.replace(each, metrics=metrics))
    return ranked
