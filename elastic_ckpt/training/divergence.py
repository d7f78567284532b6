"""Detectors of a divergence, as callbacks.

A detector has a rule, which judges each step by the numbers of the steps so far, and
acts when so many steps in a row are bad. A rule is a pure function from its state and
the numbers of a step to the next state and a reason, so that a run that goes on, on
other hosts, decides as if nothing had happened.

Averages are exponential with the weight `smoothing` for the past, corrected for their
begin as Adam's (Kingma and Ba, https://arxiv.org/abs/1412.6980, section 3). A value
that is not finite is bad for every rule, and enters no average.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from elastic_ckpt.core import storage
from elastic_ckpt.training.callbacks import Action, Finding, Report

# JSON.
State: TypeAlias = dict[str, Any]


class Rule(Protocol):
    """Judges steps."""

    def begin(self) -> State:
        """The state before the first step."""

    def after(self, state: State, report: Report) -> tuple[State, str]:
        """The next state, and why the step is bad, or an empty text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A step is bad if its loss or gradient norm is infinite or NaN."""

    def begin(self) -> State:
        """See `Rule`."""
        return {}

    def after(self, state: State, report: Report) -> tuple[State, str]:
        """See `Rule`."""
        for what, value in (
            ("loss", report.loss),
            ("gradient norm", report.gradient_norm),
        ):
            if not math.isfinite(value):
                return state, f"the {what} is {value}"
        return state, ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AboveBest:
    """A step is bad if the smoothed loss is far above its best value so far.

    Attributes:
      smoothing: the weight of the past.
      margin: how far, in nats; 0 sets no such limit.
      factor: how many times the best; 0 sets no such limit.
    """

    smoothing: float
    margin: float = 0.0
    factor: float = 0.0

    def begin(self) -> State:
        """See `Rule`."""
        return {"average": _NO_AVERAGE, "best": None}

    def after(self, state: State, report: Report) -> tuple[State, str]:
        """See `Rule`."""
        if not math.isfinite(report.loss):
            return state, f"the loss is {report.loss}"
        average = _with(state["average"], report.loss, self.smoothing)
        smoothed, best = _value(average, self.smoothing), state["best"]
        why = ""
        if best is not None:
            limits = [best + self.margin] * bool(self.margin)
            limits += [best * self.factor] * bool(self.factor and best > 0)
            if limits and smoothed > min(limits):
                why = f"the smoothed loss is {smoothed:.4g}, and was {best:.4g} at best"
        best = smoothed if best is None else min(best, smoothed)
        return {"average": average, "best": best}, why


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSpike:
    """A step is bad if its gradient norm is many times the average before it.

    A spike enters the average as the greatest norm that is none, so that the average
    follows a norm that stays high, but not a single step.

    Attributes:
      smoothing: the weight of the past.
      factor: how many times.
    """

    smoothing: float
    factor: float

    def begin(self) -> State:
        """See `Rule`."""
        return {"average": _NO_AVERAGE}

    def after(self, state: State, report: Report) -> tuple[State, str]:
        """See `Rule`."""
        norm, before = report.gradient_norm, state["average"]
        if not math.isfinite(norm):
            return state, f"the gradient norm is {norm}"
        why = ""
        if before["count"]:
            average = _value(before, self.smoothing)
            if norm > self.factor * average:
                why = f"the gradient norm is {norm:.4g}, and was {average:.4g} before"
                norm = self.factor * average
        return {"average": _with(before, norm, self.smoothing)}, why


class Detector:
    """Acts when so many steps in a row are bad by a rule; a `Callback`.

    Args:
      rule: judges the steps.
      action: what the run does then. While steps stay bad, it does it again each time
        that there were so many of them.
      patience: how many steps.
      warmup: the first steps of the run, which are never bad.
    """

    def __init__(
        self, rule: Rule, *, action: Action, patience: int = 1, warmup: int = 0
    ) -> None:
        self._rule = rule
        self._action = action
        self._patience = patience
        self._warmup = warmup
        self._seen = 0
        # The bad steps in a row since the last action, and the first bad one in a row.
        self._bad = 0
        self._since: int | None = None
        self._state = rule.begin()

    def after_step(self, step: int, report: Report) -> Finding | None:
        """See `Callback`."""
        self._state, why = self._rule.after(self._state, report)
        self._seen += 1
        if not why or self._seen <= self._warmup:
            self._bad, self._since = 0, None
            return None
        self._bad += 1
        self._since = step if self._since is None else self._since
        if self._bad < self._patience:
            return None
        self._bad = 0
        return Finding(
            action=self._action,
            why=f"{why}, since step {self._since}",
            since=self._since,
            is_divergence=True,
        )

    def after_evaluation(self, step: int, loss: float) -> None:
        """Does nothing: an evaluation is of the same state as the next step's loss."""
        del step, loss

    def get_state(self) -> storage.Json:
        """See `Callback`."""
        return {
            "seen": self._seen,
            "bad": self._bad,
            "since": self._since,
            "rule": self._state,
        }

    def set_state(self, state: Any) -> None:
        """See `Callback`."""
        rule = state["rule"]
        if rule.keys() != self._rule.begin().keys():
            raise ValueError("it is the state of another rule")
        self._seen, self._bad = state["seen"], state["bad"]
        self._since, self._state = state["since"], rule


_NO_AVERAGE: Mapping[str, Any] = {"sum": 0.0, "count": 0}


def _with(average: Mapping[str, Any], value: float, smoothing: float) -> State:
    total = smoothing * average["sum"] + (1 - smoothing) * value
    return {"sum": total, "count": average["count"] + 1}


def _value(average: Mapping[str, Any], smoothing: float) -> float:
    return average["sum"] / (1 - smoothing ** average["count"])
