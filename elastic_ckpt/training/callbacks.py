"""Callbacks of the training loop, whose state is saved with each step.

A callback receives the numbers of each step, and of each evaluation, and may return a
`Finding`: then the run goes on, stops, or goes back. Its state goes into every step of
the run under the callback's name, and comes back with it, on any number of hosts.

Every host has the same callbacks, which receive the same numbers: they must be
deterministic, so that all hosts act alike. The loop reads the numbers of a step while
the devices compute the next one, so callbacks never delay them.

Version 1 of the component's file, `callbacks.json` (a `checked_json` file), has the
fields `rollbacks`, how often the run has gone back, and `callbacks`, the state of each
callback by name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from absl import logging
from etils import epath

from elastic_ckpt.core import checked_json, errors, events, storage, topology

# The name of the component of a step with the states of all callbacks.
COMPONENT = "callbacks"
_FILE = "callbacks.json"
_VERSION = 1


class Action(enum.Enum):
    """The action of a run on a finding.

    WARN: goes on. ROLLBACK: goes back to a good step, and leaves out the data since
    then. STOP: saves, and ends; at a divergence the last good step stays the newest.
    ABORT: ends without a save. DISTRUST: goes back to a step in storage, and repeats
    the data since then, if the run was restored just before
    (`Callbacks.distrust_until`); otherwise it goes on.
    """

    WARN = "warn"
    ROLLBACK = "rollback"
    STOP = "stop"
    ABORT = "abort"
    DISTRUST = "distrust"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The numbers of a step, the same on all hosts.

    Attributes:
      loss: over the global batch, before the update.
      gradient_norm: of all gradients, before they are clipped.
      tokens: the targets of the global batch, without padding.
      learning_rate: of the update.
    """

    loss: float
    gradient_norm: float
    tokens: int
    learning_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A divergence, or another reason to act.

    Attributes:
      action: what the run does about it.
      why: for people, the end of a sentence.
      since: the first step that is bad, counted from 1: steps saved before it was
        computed are good if they are two steps older, as its loss is that of the state
        before.
      is_divergence: whether the states since then are bad: a run that stops then leaves
        the last good step as the newest, and does not save the present one. Soon after
        a restore it is first of all a reason to distrust that.
    """

    action: Action
    why: str
    since: int
    is_divergence: bool = False


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


class Callback(Protocol):
    """A callback; a run has any number, each under its own name."""

    def after_step(self, step: int, report: Report) -> Finding | None:
        """Receives the numbers of a step, while the next one is computed.

        Args:
          step: its number, counted from 1: the steps done.
          report: its numbers.
        """

    def after_evaluation(self, step: int, loss: float) -> Finding | None:
        """Receives the mean loss of an evaluation after `step` steps."""

    def get_state(self) -> storage.Json:
        """The state after the last call, as JSON."""

    def set_state(self, state: Any) -> None:
        """Goes back to a state that `get_state` has returned, in any process."""


class Callbacks:
    """The callbacks of a run, in order; an Orbax `StatefulCheckpointable`.

    Args:
      callbacks: by name; a state is restored to the callback with its name.
      required: the names of those without which a saved step must not be continued; the
        others begin anew, with a warning.
      emit: called for each finding.

    Attributes:
      decision: the strongest finding of the first step with one on which the run has to
        act; None if there is none. Later findings are ignored.
      decided_step: the number of that step.
      rollbacks: how often the run has gone back.
    """

    def __init__(
        self,
        callbacks: Mapping[str, Callback] | None = None,
        *,
        required: Collection[str] = (),
        emit: events.Emit = events.nobody,
    ) -> None:
        self._callbacks = dict(callbacks or {})
        for name, callback in self._callbacks.items():
            _check(name, callback)
        self._required = frozenset(required)
        unknown = sorted(self._required - self._callbacks.keys())
        if unknown:
            raise errors.ConfigError(
                f"callbacks {unknown} are required, but the callbacks of the run are"
                f" {sorted(self._callbacks)}; correct the names"
            )
        self._emit = emit
        self._fresh = {name: _state(name, c) for name, c in self._callbacks.items()}
        self.decision: Finding | None = None
        self.decided_step = 0
        self.rollbacks = 0
        self._distrusted_until = 0
        self._go_back: Callable[[int, str], bool] = _never

    def __len__(self) -> int:
        return len(self._callbacks)

    def distrust_until(self, step: int, go_back: Callable[[int, str], bool]) -> None:
        """Distrusts the present state, which was restored, until a step is done.

        If the loss is not finite until then, or a callback finds a divergence, the
        decision is `Action.DISTRUST`; at most once, and only if the run goes back.

        Args:
          step: the last step that counts.
          go_back: called with the step and the reason, on all hosts alike; returns
            whether the run goes back.
        """
        self._distrusted_until, self._go_back = step, go_back

    def reads(self, step: int) -> bool:
        """Whether the numbers of a step are needed."""
        return bool(self._callbacks) or step <= self._distrusted_until

    @property
    def is_distrusted(self) -> bool:
        """Whether the decision is to go back to storage."""
        return self.decision is not None and self.decision.action is Action.DISTRUST

    def after_step(self, step: int, report: Report) -> None:
        """Passes the numbers of a step to all callbacks."""
        if not math.isfinite(report.loss):
            self._distrust(step, f"the loss is {report.loss}")
        for name, callback in self._callbacks.items():
            self._note(name, step, callback.after_step(step, report))

    def after_evaluation(self, step: int, loss: float) -> None:
        """Passes the loss of an evaluation to all callbacks."""
        for name, callback in self._callbacks.items():
            self._note(name, step, callback.after_evaluation(step, loss))

    def get_state(self) -> dict[str, storage.Json]:
        """The states of all callbacks by name, and the number of rollbacks."""
        states = {name: _state(name, c) for name, c in self._callbacks.items()}
        return {"rollbacks": self.rollbacks, "callbacks": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the callbacks whose names a state has.

        Raises:
          CheckpointError: if it lacks one that is required, or a callback refuses its
            state. Other callbacks that it lacks begin anew.
        """
        saved = state["callbacks"]
        self._check_names(saved)
        for name, callback in self._callbacks.items():
            value = saved.get(name, self._fresh[name])
            try:
                callback.set_state(value)
            except (KeyError, TypeError, ValueError) as error:
                raise errors.CheckpointError(
                    f"the callback {name!r} cannot continue from its saved state"
                    f" {json.dumps(value)[:200]} ({error!r}); give the present one"
                    " another name, and it begins anew"
                ) from error
        self.rollbacks = state["rollbacks"]
        self.go_on()

    def go_on(self) -> None:
        """Drops the decision; the run goes on from another state, and trusts it."""
        self.decision = None
        self.distrust_until(0, _never)

    def begin_anew(self) -> None:
        """Continues a step that was saved without any callbacks.

        Raises:
          CheckpointError: if one is required.
        """
        self.set_state({"rollbacks": 0, "callbacks": {}})

    async def save(self, directory: Any) -> Awaitable[None]:
        """Takes the state; the awaitable writes it into Orbax's directory."""
        content = checked_json.to_bytes(self.get_state(), version=_VERSION)
        writes = topology.is_primary()

        async def write() -> None:
            path = await directory.await_creation()
            if writes:
                await asyncio.to_thread(storage.write_atomic, path / _FILE, content)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Restores the state in `directory`; see `set_state`."""
        path = epath.Path(directory) / _FILE
        self.set_state(
            checked_json.read(path, what="state of callbacks", version=_VERSION)
        )
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _note(self, name: str, step: int, finding: Finding | None) -> None:
        is_late = self.decision is not None and step > self.decided_step
        if finding is None or is_late:
            return
        action = finding.action.value
        self._emit(
            "divergence_found", step=step, callback=name, action=action, why=finding.why
        )
        named = dataclasses.replace(finding, why=f"{name}: {finding.why}")
        if finding.is_divergence or finding.action is Action.DISTRUST:
            self._distrust(step, named.why)
        if finding.action not in (Action.WARN, Action.DISTRUST):
            self._decide(step, named)

    def _decide(self, step: int, finding: Finding) -> None:
        self.decision = stronger(self.decision, finding)
        self.decided_step = step

    def _distrust(self, step: int, why: str) -> None:
        if step > self._distrusted_until:
            return
        go_back = self._go_back
        self.distrust_until(0, _never)
        if go_back(step, why):
            finding = Finding(
                action=Action.DISTRUST, why=why, since=step, is_divergence=True
            )
            self._decide(step, finding)

    def _check_names(self, saved: Mapping[str, Any]) -> None:
        missing = [name for name in self._callbacks if name not in saved]
        required = sorted(self._required.intersection(missing))
        if required:
            raise errors.CheckpointError(
                f"the saved step has no state of the required callbacks {required}; it"
                f" has those of {sorted(saved)}: give them back their names, or do not"
                " require them, and they begin anew"
            )
        if missing and saved:
            logging.warning("callbacks %s are new, and begin anew", missing)
        gone = sorted(saved.keys() - self._callbacks.keys())
        if gone:
            logging.warning(
                "the saved step has the state of callbacks %s, which the run does not"
                " have now; the next save drops it",
                gone,
            )


def stronger(first: Finding | None, second: Finding) -> Finding:
    """The finding with the stronger action, and the earlier of the first bad steps."""
    findings = [f for f in (first, second) if f is not None]
    strongest = max(findings, key=lambda f: list(Action).index(f.action))
    return dataclasses.replace(strongest, since=min(f.since for f in findings))


def _never(step: int, why: str) -> bool:
    del step, why
    return False


_METHODS = ("after_step", "after_evaluation", "get_state", "set_state")


def _check(name: object, callback: object) -> None:
    if not isinstance(name, str):
        raise errors.ConfigError(
            f"a callback has the name {name!r}, a {type(name).__name__}, and its state"
            " is saved under a text; name it by a text"
        )
    if isinstance(callback, type):
        raise errors.ConfigError(
            f"the callback {name!r} is a class; give an instance of it"
        )
    missing = [each for each in _METHODS if not callable(getattr(callback, each, None))]
    if missing:
        raise errors.ConfigError(
            f"the callback {name!r}, a {type(callback).__name__}, has no"
            f" {', '.join(missing)}; give it the methods of"
            " elastic_ckpt.training.callbacks.Callback"
        )


def _state(name: str, callback: Callback) -> storage.Json:
    state = callback.get_state()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise errors.CheckpointError(
            f"the state of the callback {name!r} is not JSON ({error}); return numbers,"
            " texts, lists and dicts from its get_state"
        ) from error
