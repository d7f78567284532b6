"""The best steps by a metric: a preservation policy beside Orbax's.

Unlike Orbax's `BestN` it ranks NaN and infinite metrics behind all others, and it does
not keep every step that was never evaluated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors


@dataclasses.dataclass(frozen=True)
class BestN:
    """Preserves the best steps by a metric; a `retention.PreservationPolicy`.

    A step is not among the best if it has no such metric, or if the metric is NaN or
    infinite. The oldest of steps with equal metrics counts as the best, so that only a
    better step replaces one. A step is ranked from the time when its metric is known;
    until then other policies, or a lease of the program that evaluates it, keep it.

    Attributes:
      n: steps to preserve.
      metric: the name of the metric, such as `eval_loss`.
      higher_is_better: False for a loss.

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
        """Whether each of `checkpoints`, ordered by step, is among the best."""
        del context
        ranks = [self.rank(each.metrics) for each in checkpoints]
        ordered = sorted(
            (rank, number) for number, rank in enumerate(ranks) if rank is not None
        )
        best = {number for _, number in ordered[: self.n]}
        return [number in best for number in range(len(checkpoints))]

    def rank(self, metrics: Mapping[str, Any] | None) -> float | None:
        """The rank of a step: lower is better; None if it is never among the best.

        Args:
          metrics: of the step; None if it was not evaluated.
        """
        value = (metrics or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return None
        return -value if self.higher_is_better else value
