"""Retention: which steps a tier removes by a policy, and which it always keeps.

A policy is any object with Orbax's `should_preserve`: those of
`orbax.checkpoint.v1.training.preservation_policies` fit as they are (`LatestN`,
`EveryNSteps`, `EveryNSeconds`, `BestN`, `CustomSteps`, and `AnyPreservationPolicy` over
some of them). Orbax itself is not imported, because the sidecar does not have it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step_id import StepId

_BEGINNING = datetime.datetime.fromtimestamp(0, datetime.UTC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step in one tier, with the fields of Orbax's `PolicyCheckpointInfo`.

    Attributes:
      step: the training step.
      time: when it was saved, with a time zone.
      metrics: the values it is ranked by; None if it was not evaluated.
      complete: whether this tier alone has all of it; None if a part of what would tell
        could not be read, so that it is kept.
      save: which save of it.
    """

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None
    complete: bool | None
    save: str = ""

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        return StepId(self.step, self.save)

    @classmethod
    def from_contents(
        cls, step_id: StepId, contents: Contents | None, *, complete: bool | None
    ) -> HeldStep:
        """A step with the time and the metrics of its manifest.

        Args:
          step_id: the step.
          contents: None if the manifest could not be read, or is damaged.
          complete: see the class.
        """
        time_ms, metrics = 0, None
        if contents is not None:
            time_ms, metrics = contents.time_ms, contents.metrics
        return cls(
            step=step_id.step,
            save=step_id.save,
            time=_BEGINNING + datetime.timedelta(milliseconds=time_ms),
            metrics=None if metrics is None else json.loads(metrics),
            complete=complete,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The context that Orbax's policies receive besides the steps: empty."""


class PreservationPolicy(Protocol):
    """Decides which steps are kept; Orbax's policies have this interface."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Whether each of `checkpoints`, ordered by step, is kept."""
        ...


class NewestOnly:
    """Preserves only the newest complete step, which is never removed."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns False for each."""
        del context
        return [False] * len(checkpoints)


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
    flight or preserved. The policy receives
    only complete steps, so that `LatestN(3)` keeps three that can be restored; older
    steps that are not complete in any mixture of tiers are removed.

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
        flags = policy.should_preserve(whole, context=Context())
        kept |= {step.step for step, keep in zip(whole, flags, strict=True) if keep}
        kept.add(whole[-1].step)
    if newest_complete is None:
        # No complete step replaces these.
        return []
    return [
        step.step
        for step in ordered
        if step.step not in kept and step.step < newest_complete
    ]
