"""Goodput: the share of a run's time spent on new steps, and where the rest went.

    goodput percent = 100 * productive / (productive + all losses)

Everything is computed from a run's events and their times. The time between consecutive
events has one cause, so the parts add up to the total. The total begins when the
process that writes the journal starts, and excludes time without such a process. Until
the first step of a world, the cause is the last phase that began (`core.events`).

productive  from one logged step to the next, if no earlier world had trained that step
again       the same, for a step that an earlier world had trained: a lost step
save        a save blocked the loop (`save_blocked`)
evaluate    an evaluation (`evaluated`)
validate    a comparison of state replicas (`validated`)
end         from the last logged step of a world to its end: detecting a failure, losing
            the step in progress, awaiting the last uploads; likewise until the run
            returns to a step in storage (`restore_distrusted`)
wait        `waiting_for_slices`
decide      until the slices of a world are known
start       until the world's processes have joined
prepare     until the job is assembled and the newest step is found
restore     until state and data are restored, or a run has rolled back (`rolled_back`)
compile     until the first batch is read and the step is compiled or loaded
first_step  until the first step of a world
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.core import events, metrics, storage

CAUSES = tuple(metrics.GOODPUT_SECS)
# The causes of a recovery, by their names in the `recovered` event.
PHASES = ("end", "decide", "start", "prepare", "restore", "compile", "step")
# The causes of phases before the first step of a world; other phases belong to `end`.
_CAUSES = {
    "choosing slices": "decide",
    "waiting for slices": "wait",
    "starting a world": "start",
    "searching for the newest step": "prepare",
    "restoring": "restore",
    "reading the first batch": "compile",
    "compiling": "compile",
    "training": "first_step",
}
# Phases that may begin between steps of a world.
_OF_STEPS = (
    *("", "training", "compiling", "reading the first batch"),
    *("leaving for other slices", "saving before the end"),
)
# Events whose seconds are part of a step's seconds.
_WITHIN = {
    "save_blocked": "save",
    "evaluated": "evaluate",
    "validated": "validate",
    "rolled_back": "restore",
    "compiled": "compile",
    "executable_loaded": "compile",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """The seconds of a run by cause, up to an event.

    Attributes:
      time: the time of the last event that ended a part, in seconds on any clock.
      newest_step: the highest step ever reached.
      phase: the last phase to begin before a world's first step; empty after that step.
      within: by cause, the seconds since `time` that do not belong to a step.
      before: the value of `secs` when the current recovery began; None outside
        recoveries.
    """

    time: float
    secs: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CAUSES, 0.0)
    )
    newest_step: int = 0
    phase: str = "choosing slices"
    within: Mapping[str, float] = dataclasses.field(default_factory=dict)
    before: Mapping[str, float] | None = None

    @property
    def percent(self) -> float:
        """The goodput, in percent."""
        return 100 * self.secs["productive"] / max(sum(self.secs.values()), 1e-9)

    def recovered(self) -> dict[str, Any] | None:
        """The seconds for the `recovered` event; None unless a recovery has ended."""
        if self.before is None or self.phase:
            return None
        spent = {cause: self.secs[cause] - self.before[cause] for cause in CAUSES}
        spent["decide"] += spent["wait"]
        spent["step"] = spent["first_step"]
        phases = {f"{phase}_secs": spent[phase] for phase in PHASES}
        return {"secs": sum(phases.values()), **phases}


def after(
    account: Account, name: str, fields: Mapping[str, storage.Json], *, time: float
) -> Account:
    """The account after an event, whose time is on the account's clock."""
    begins = events.NAMES[name].begins
    if name == "restore_distrusted" and fields.get("to_step") is not None:
        begins = "restoring"
    if name == "step":
        step = int(str(fields["step"]))
        cause = "productive" if step > account.newest_step else "again"
        ended = _ended(account, "first_step" if account.phase else cause, time)
        newest_step = max(account.newest_step, step)
        return dataclasses.replace(ended, newest_step=newest_step, phase="")
    if not account.phase and name in _WITHIN:
        cause = _WITHIN[name]
        secs = account.within.get(cause, 0.0) + float(str(fields["secs"]))
        return dataclasses.replace(account, within={**account.within, cause: secs})
    if begins in _OF_STEPS if not account.phase else not begins:
        return account
    ended = _ended(account, _CAUSES.get(account.phase, "end"), time)
    return dataclasses.replace(ended, phase=begins)


def lost(account: Account, *, since: float, time: float) -> Account:
    """The account when a world has ended and a recovery begins.

    `since` is when the first host failed or all hosts were asked to leave.
    """
    ended = _ended(account, "end", time)
    # A world lost before its first step is part of the same recovery.
    before = account.before or {
        **ended.secs,
        "end": ended.secs["end"] - (time - since),
    }
    return dataclasses.replace(ended, phase="choosing slices", before=before)


def _ended(account: Account, cause: str, time: float) -> Account:
    # Ends a part; attributes time within it that has other causes to those causes.
    left = max(0.0, time - account.time)
    secs = dict(account.secs)
    for each, within in account.within.items():
        taken = min(left, within)
        secs[each] += taken
        left -= taken
    secs[cause] += left
    return dataclasses.replace(
        account, time=max(time, account.time), secs=secs, within={}
    )


class RunMetrics:
    """An `Emit` that passes events on and records the run's metrics.

    The process that writes the journal records the metrics. That process outlives
    worlds, so each series continues when slices are lost or rejoin.

    Args:
      emit: a function called with each event, before its metrics are recorded.
      newest_step: the number of steps that earlier launches of the run have completed.
    """

    def __init__(
        self,
        emit: events.Emit,
        *,
        newest_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._account = Account(time=clock(), newest_step=newest_step)
        self._missing: frozenset[int] = frozenset()

    def __call__(self, name: str, **fields: Any) -> None:
        """Passes an event on."""
        self._emit(name, **fields)
        before = self._account.secs
        self._account = after(self._account, name, fields, time=self._clock())
        for cause, secs in self._account.secs.items():
            if secs > before[cause]:
                metrics.GOODPUT_SECS[cause].record(secs - before[cause])
        if self._account.secs is not before:
            metrics.GOODPUT.record(self._account.percent)
        values = {**fields, "": 1}
        if name == "step" and fields["secs"] > 0:
            values["steps_per_sec"] = 1 / fields["secs"]
            if fields.get("tokens") is not None:
                values["tokens_per_sec"] = fields["tokens"] / fields["secs"]
        elif name == "world_started":
            values["slices"] = len(fields["slices"])
            self._missing -= {*fields["slices"], *fields["spares"]}
        elif name == "slice_returned":
            self._missing -= {fields["slice"]}
        elif name in _MISSING:
            self._missing |= {fields["slice"]}
        values["missing"] = len(self._missing)
        for field, metric in _OF_EVENTS.get(name, {}).items():
            # A user's loop may not report all fields.
            if values.get(field) is not None:
                metric.record(float(values[field]))


# Events after which a slice is not used until it returns.
_MISSING = ("slice_lost", "slice_preempted", "slice_refused", "slice_quarantined")
# The metrics of each event, by field; "" counts the event.
_OF_EVENTS: dict[str, dict[str, metrics.Metric]] = {
    "step": {
        "step": metrics.TRAIN_STEPS,
        "loss": metrics.TRAIN_LOSS,
        "secs": metrics.TRAIN_STEP,
        "tokens": metrics.TRAIN_TOKENS,
        "learning_rate": metrics.TRAIN_LEARNING_RATE,
        "steps_per_sec": metrics.TRAIN_STEP_RATE,
        "tokens_per_sec": metrics.TRAIN_TOKEN_RATE,
    },
    "run_started": {
        "slices": metrics.SLICES,
        "missing": metrics.MISSING_SLICES,
        "steps": metrics.TRAIN_PLANNED,
    },
    "world_started": {"slices": metrics.SLICES, "missing": metrics.MISSING_SLICES},
    "slice_returned": {"missing": metrics.MISSING_SLICES},
    **{name: {"missing": metrics.MISSING_SLICES} for name in _MISSING},
    "slice_lost": {"": metrics.LOST_SLICES, "missing": metrics.MISSING_SLICES},
    "world_claimed": {"world": metrics.TRAIN_CLAIM},
    "saved": {"step": metrics.SAVED_STEPS},
    "backed_up": {"step": metrics.STORED_STEPS},
    "recovered": {"steps_lost": metrics.LOST_STEPS},
    "host_lost": {"": metrics.LOST_HOSTS},
    "divergence_found": {"": metrics.FINDINGS},
    "rolled_back": {"": metrics.ROLLBACKS},
    "run_failed": {"": metrics.FAILURES},
}
