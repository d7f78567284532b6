"""Callbacks of the training loop, whose state is saved with each step.

A callback receives the metrics of each step and evaluation and may return a
`Detection`, which makes the run continue, stop, or roll back. Each saved step contains
every callback's state under the callback's name; the states can be restored on any
number of hosts.

Every host calls the same callbacks with the same metrics. They must be deterministic,
so that all hosts reach the same decision. The loop reads a step's metrics while the
devices compute the next step, so callbacks do not delay it.

A `Detector` is a callback that finds divergence: its rule judges each step by the
metrics so far, and it acts once enough consecutive steps are bad. Rules use exponential
averages, with the weight `smoothing` for the past and Adam's bias correction (Kingma
and Ba, https://arxiv.org/abs/1412.6980, section 3). A non-finite value is bad for every
rule and is not averaged.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from absl import logging

from elastic_ckpt.core import errors, events
from elastic_ckpt.training import schema

# The component of a step that contains the states of all callbacks.
COMPONENT = "callbacks"
# The weight of the past in the averages of the loss and of the gradient norm.
_PAST_LOSSES = 0.9
_PAST_NORMS = 0.99


class Action(enum.Enum):
    """What a run does about a finding; of two actions, the one listed later wins.

    WARN: continues. ROLLBACK: returns to a good step and skips the data read since.
    STOP: saves and stops; after a divergence, the last good step stays the newest.
    ABORT: stops without saving. DISTRUST: if the run was restored shortly before
    (`Callbacks.distrust_until`), returns to a step in storage and trains on the same
    data again; otherwise continues.
    """

    WARN = "warn"
    ROLLBACK = "rollback"
    STOP = "stop"
    ABORT = "abort"
    DISTRUST = "distrust"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of a step, the same on all hosts.

    Attributes:
      loss: the loss of the global batch, before the update.
      gradient_norm: the norm of all gradients, before clipping.
      tokens: the number of targets in the global batch, excluding padding.
    """

    loss: float
    gradient_norm: float
    tokens: int
    learning_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """A divergence, or another reason to act.

    Attributes:
      action: what the run does about it.
      why: the human-readable reason, phrased as the end of a sentence.
      since: the first bad step, counted from 1. Saved steps are good if they are at
        least two steps older: a step's loss belongs to the state before the step.
      is_divergence: whether the states from `since` on are bad. If so, a run that stops
        does not save the current step, and the last good step stays the newest. Soon
        after a restore, the run first distrusts the restored state.
    """

    action: Action
    why: str
    since: int
    is_divergence: bool = False


def good_step(saved: Sequence[int], *, since: int, margin: int = 0) -> int | None:
    """The newest saved step from before a divergence; None if there is none.

    The loss of step n belongs to the state after n - 1 steps. So the state after
    `since` - 1 steps may be bad, and the state before it is good.

    Args:
      saved: the complete steps.
      since: the first bad step, counted from 1.
      margin: the number of additional steps to exclude before `since`.
    """
    return max((step for step in saved if step <= since - 2 - margin), default=None)


def step_to_go_back_to(
    finding: Detection,
    saved: Sequence[int],
    *,
    before: int,
    began_at: int = 0,
    most: int = 3,
    margin: int = 0,
    first_due: int = 0,
) -> int:
    """The step to which a run rolls back.

    Prefers a step saved at least two steps before the first bad one. The second choice
    is the step right before the bad one, which is good if only the batch was bad. If
    that step has already failed or is not saved, the run rolls back to step 0, the
    initial state, unless an older step was due and has been deleted.

    Args:
      finding: the callback's finding.
      saved: the complete steps.
      before: the number of earlier rollbacks.
      began_at: the step at which the run began, or the target of the last rollback.
      most: the maximum number of rollbacks.
      margin: the number of additional steps to exclude before a divergence.
      first_due: the first step that the run saves; 0 if the run cannot return to
        step 0.

    Raises:
      DivergedError: if the run has rolled back too often, or no good step is left.
    """
    if before >= most:
        raise errors.DivergedError(
            f"{finding.why}, and the run has already rolled back {before} times"
            f" (divergence_max_rollbacks={most}); find the cause, or raise the limit"
        )
    step = good_step(saved, since=finding.since, margin=margin)
    has_failed = before > 0 and began_at == finding.since - 1
    if step is None and not has_failed:
        step = good_step(saved, since=finding.since + 1, margin=margin)
    if step is None and 0 < first_due > finding.since - 2 - margin:
        step = 0
    if step is None:
        raise errors.DivergedError(
            f"{finding.why}, and there is no earlier good step to return to (complete"
            f" steps: {list(saved) or 'none'}); keep more steps or older ones, or save"
            " more often"
        )
    return step


@runtime_checkable
class Callback(Protocol):
    """A callback; a run may have any number, each under its own name."""

    def after_step(self, step: int, report: StepMetrics) -> Detection | None:
        """Receives the metrics of a step while the next one is computed.

        Args:
          step: the number of completed steps, including this one.
          report: the metrics of the step.
        """

    def after_evaluation(self, step: int, loss: float) -> Detection | None:
        """Receives the mean loss of an evaluation after `step` steps."""

    def get_state(self) -> Any:
        """The state after the last call, as `ec.components.Component` can save it."""

    def set_state(self, state: Any) -> None:
        """Restores a state that `get_state` returned, in any process."""


class Callbacks:
    """The callbacks of a run, in order; `ec.components.Component` saves their states.

    Args:
      callbacks: the callbacks, keyed by name.
      emit: called for each finding.

    Attributes:
      decision: the strongest finding at the first step whose findings require the run
        to act; None if there is none. Later findings are ignored.
      decided_step: the step that `decision` is about.
      rollbacks: the number of times that the run has rolled back.
    """

    def __init__(
        self,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        emit: events.Emit = events.nobody,
    ) -> None:
        self._callbacks = dict(callbacks or {})
        for name, callback in self._callbacks.items():
            if isinstance(callback, type) or not isinstance(callback, Callback):
                raise errors.ConfigError(
                    f"the callback {name!r} is of type {type(callback).__name__}, which"
                    " lacks some of the methods after_step, after_evaluation, get_state"
                    " and set_state; implement elastic_ckpt.training.callbacks.Callback"
                )
        self._emit = emit
        self.decided_step = self.rollbacks = 0
        self._fresh = self.get_state()["callbacks"]
        self.reset()

    def __len__(self) -> int:
        return len(self._callbacks)

    def distrust_until(self, step: int, roll_back: Callable[[int, str], bool]) -> None:
        """Distrusts the restored state until a step is completed.

        If the loss becomes non-finite by then or a callback finds a divergence, the
        decision is `Action.DISTRUST`, at most once and only if `roll_back` agrees.

        Args:
          step: the last step at which the restored state is distrusted.
          roll_back: called with the step and the reason, in the same way on all hosts;
            returns whether the run returns to an older step.
        """
        self._distrusted_until, self._roll_back = step, roll_back

    def reset(self) -> None:
        """Drops the decision: the run continues from a different, trusted state."""
        self.decision: Detection | None = None
        self.distrust_until(0, lambda *_: False)

    def reads(self, step: int) -> bool:
        """Whether the metrics of a step are needed."""
        return bool(self._callbacks) or step <= self._distrusted_until

    def after_step(self, step: int, report: StepMetrics) -> None:
        """Passes the metrics of a step to all callbacks."""
        if not math.isfinite(report.loss):
            why = f"the loss is {report.loss}"
            self._decide(step, Detection(action=Action.DISTRUST, why=why, since=step))
        for name, callback in self._callbacks.items():
            self._note(name, step, callback.after_step(step, report))

    def after_evaluation(self, step: int, loss: float) -> None:
        """Passes the loss of an evaluation to all callbacks."""
        for name, callback in self._callbacks.items():
            self._note(name, step, callback.after_evaluation(step, loss))

    def get_state(self) -> dict[str, Any]:
        """The states of all callbacks by name and the number of rollbacks."""
        states = {name: each.get_state() for name, each in self._callbacks.items()}
        return {"rollbacks": self.rollbacks, "callbacks": copy.deepcopy(states)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the callbacks whose names are in `state`; resets the others.

        Raises:
          CheckpointError: if a callback rejects its state.
        """
        saved = state["callbacks"]
        new = sorted(self._callbacks.keys() - saved.keys())
        gone = sorted(saved.keys() - self._callbacks.keys())
        if saved and (new or gone):
            logging.warning(
                "callbacks %s are new and start without a state; the next save drops"
                " the state of callbacks %s, which the run no longer has",
                *(new, gone),
            )
        for name, callback in self._callbacks.items():
            value = saved.get(name, self._fresh[name])
            try:
                callback.set_state(value)
            except (KeyError, TypeError, ValueError) as error:
                raise errors.CheckpointError(
                    f"the callback {name!r} cannot restore its saved state"
                    f" {str(value)[:200]} ({error!r}); to start without a state, rename"
                    " the callback"
                ) from error
        self.rollbacks = state["rollbacks"]
        self.reset()

    def start_over(self) -> None:
        """Continues from a step that was saved without callbacks."""
        self.set_state({"rollbacks": 0, "callbacks": {}})

    def _note(self, name: str, step: int, finding: Detection | None) -> None:
        is_late = self.decision is not None and step > self.decided_step
        if finding is None or is_late:
            return
        self._emit(
            "divergence_found",
            step=step,
            callback=name,
            action=finding.action.value,
            why=finding.why,
        )
        self._decide(step, dataclasses.replace(finding, why=f"{name}: {finding.why}"))

    def _decide(self, step: int, finding: Detection) -> None:
        # The strongest action and the earliest bad step apply. A recent restore is the
        # first suspect, once.
        action, rolls_back = finding.action, False
        is_doubt = finding.is_divergence or action is Action.DISTRUST
        if is_doubt and step <= self._distrusted_until:
            self._distrusted_until = 0
            rolls_back = self._roll_back(step, finding.why)
        if not rolls_back and action in (Action.WARN, Action.DISTRUST):
            return
        if rolls_back:
            finding = dataclasses.replace(finding, action=Action.DISTRUST)
        found = [each for each in (self.decision, finding) if each is not None]
        strongest = max(found, key=lambda each: list(Action).index(each.action))
        since = min(each.since for each in found)
        self.decision = dataclasses.replace(strongest, since=since)
        self.decided_step = step


# A rule's state; empty before the first step.
State: TypeAlias = dict[str, Any]
# Updates the state with a step's metrics; returns why the step is bad, or "".
Rule = Callable[[State, StepMetrics], str]


def non_finite(_: State, report: StepMetrics) -> str:
    """A rule: a step is bad if its loss or gradient norm is infinite or NaN."""
    values = {"loss": report.loss, "gradient norm": report.gradient_norm}
    bad = (f"the {what} is {v}" for what, v in values.items() if not math.isfinite(v))
    return next(bad, "")


def loss_above_best(
    state: State, report: StepMetrics, *, smoothing: float, factor: float
) -> str:
    """A rule: a step is bad if the smoothed loss exceeds `factor` times its best."""
    if not math.isfinite(report.loss):
        return f"the loss is {report.loss}"
    smoothed = _averaged(state, report.loss, smoothing)
    best = state.get("best", math.inf)
    state["best"] = min(best, smoothed)
    if best <= 0 or smoothed <= best * factor:
        return ""
    return f"the smoothed loss is {smoothed:.4g}, and was {best:.4g} at best"


def gradient_spike(
    state: State, report: StepMetrics, *, smoothing: float, factor: float
) -> str:
    """A rule: a step is bad if its gradient norm exceeds `factor` times the average.

    A spike enters the average as the largest norm that is not a spike, so the average
    follows a norm that stays high but not a single spike.
    """
    norm, before = report.gradient_norm, state.get("average", math.inf)
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    state["average"] = _averaged(state, min(norm, factor * before), smoothing)
    if norm <= factor * before:
        return ""
    return f"the gradient norm is {norm:.4g}, and was {before:.4g} before"


def _averaged(state: State, value: float, smoothing: float) -> float:
    # Adds a value to the average in `state` and returns the new average.
    state["sum"] = smoothing * state.get("sum", 0.0) + (1 - smoothing) * value
    state["count"] = state.get("count", 0) + 1
    return state["sum"] / (1 - smoothing ** state["count"])


class Detector:
    """A `Callback` that acts when a rule finds consecutive bad steps.

    Args:
      rule: the function that judges each step.
      action: what the run does after every `patience` consecutive bad steps.
      patience: the number of consecutive bad steps that trigger the action.
    """

    def __init__(self, rule: Rule, *, action: Action, patience: int = 1) -> None:
        self._rule = rule
        self._action = action
        self._patience = patience
        # The count of consecutive bad steps restarts after each action.
        self._state: State = {"bad": 0, "since": None, "rule": {}}

    def after_step(self, step: int, report: StepMetrics) -> Detection | None:
        """See `Callback`."""
        state = self._state
        why = self._rule(state["rule"], report)
        if not why:
            state["bad"], state["since"] = 0, None
            return None
        state["bad"] += 1
        state["since"] = state["since"] or step
        if state["bad"] < self._patience:
            return None
        state["bad"] = 0
        return Detection(
            action=self._action,
            why=f"{why}, since step {state['since']}",
            since=state["since"],
            is_divergence=True,
        )

    def after_evaluation(self, step: int, loss: float) -> None:
        """Does nothing: the next step's loss belongs to the same state."""

    def get_state(self) -> Any:
        """See `Callback`."""
        return self._state

    def set_state(self, state: Any) -> None:
        """See `Callback`."""
        self._state = {name: copy.copy(state[name]) for name in self._state}


def configured(
    config: schema.Config, *, emit: events.Emit = events.nobody
) -> Callbacks:
    """The callbacks of a run: detectors, then the callbacks of `training_callbacks`.

    Raises:
      ConfigError: if the function of `training_callbacks` cannot be found or the run
        cannot roll back because it saves nothing.
    """
    section, own = config.divergence, {}
    is_saved = config.checkpoint.enable_checkpointing
    if section.divergence_action == "rollback" and not is_saved:
        raise errors.ConfigError(
            "divergence_action=rollback with enable_checkpointing=false: the run would"
            " have no saved step to return to; set divergence_action=stop or"
            " enable_checkpointing=true"
        )
    if name := section.training_callbacks:
        try:
            make = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise errors.ConfigError(
                f"training_callbacks={name!r} cannot be imported ({error}); use"
                " module:function, and put the module on PYTHONPATH on every host"
            ) from error
        own = make(config)
        if not isinstance(own, Mapping):
            raise errors.ConfigError(
                f"training_callbacks={name!r} returned a value of type"
                f" {type(own).__name__}; it must return a dict of callbacks by name"
            )
    return Callbacks({**detectors(section), **own}, emit=emit)


def detectors(section: schema.DivergenceSection) -> dict[str, Callback]:
    """The configured detectors by name; empty if the action is `off`."""
    if section.divergence_action == "off":
        return {}
    rules: dict[str, Rule] = {}
    if factor := section.divergence_loss_factor:
        rules["loss_above_best"] = functools.partial(
            loss_above_best, smoothing=_PAST_LOSSES, factor=factor
        )
    if factor := section.divergence_gradient_norm_factor:
        rules["gradient_norm"] = functools.partial(
            gradient_spike, smoothing=_PAST_NORMS, factor=factor
        )
    action = Action(section.divergence_action)
    patience = section.divergence_patience_steps
    return {
        "non_finite": Detector(non_finite, action=action),
        **{
            name: Detector(rule, action=action, patience=patience)
            for name, rule in rules.items()
        },
    }
