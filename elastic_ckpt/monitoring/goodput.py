"""Goodput: the part of a run's time that trained new steps, and the causes of the rest.

    goodput percent = 100 * productive / (productive + all losses)

Everything is computed from the events of a run and their times. The time between two
events has one cause, so that the parts add up to the whole. It begins when the process
that keeps the journal starts, and does not include times without such a process.

productive  from one logged step to the next, if no earlier world had trained it
again       the same, for a step that an earlier world had trained: lost steps
save        the loop was blocked by a save (`save_blocked`)
evaluate    an evaluation (`evaluated`)
validate    copies of the state were compared (`validated`)
end         from the last logged step of a world until its end: a failure is detected,
            what was trained of the next step is lost, the last uploads are awaited;
            likewise until the run goes back to storage (`restore_distrusted`)
wait        `waiting_for_slices`
decide      until `world_started`
start       until `world_joined`
prepare     until `run_started`, and what comes between the phases below
restore     until `restored_from`, or a run went back to an older step (`rolled_back`)
compile     until `compiled` or `executable_loaded`, from `compile_started`
first_step  until the first `step` of a world
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.core import metrics, storage

CAUSES = tuple(metrics.GOODPUT_SECS)

# Events that end a part of the way to a world's first step, with its cause.
_ENDS = {
    "waiting_for_slices": "decide",
    "world_started": "decide",
    "world_joined": "start",
    "run_started": "prepare",
    "restored_from": "restore",
    "compile_started": "prepare",
    "compiled": "compile",
    "executable_loaded": "compile",
    "step": "first_step",
}
# Events whose seconds are within those of a step.
_WITHIN = {
    "save_blocked": "save",
    "evaluated": "evaluate",
    "validated": "validate",
    "rolled_back": "restore",
    "compiled": "compile",
    "executable_loaded": "compile",
}
# Events after which a world trains no more.
_WORLD_ENDS = (
    *("host_lost", "slice_lost", "world_left"),
    *("data_ended", "run_finished", "run_stopped", "run_failed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """The seconds of a run by cause, up to an event.

    Attributes:
      time: of the last event that ended a part, in seconds on any clock.
      secs: by cause.
      newest_step: the most steps that were ever done.
      is_stepping: whether the first step of the world is done.
      is_waiting: whether the run waits for slices.
      within: by cause, the seconds since `time` that are not those of a step.
    """

    time: float
    secs: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CAUSES, 0.0)
    )
    newest_step: int = 0
    is_stepping: bool = False
    is_waiting: bool = False
    within: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def percent(self) -> float:
        """The goodput."""
        return 100 * self.secs["productive"] / max(sum(self.secs.values()), 1e-9)


def after(
    account: Account, name: str, fields: Mapping[str, storage.Json], *, time: float
) -> Account:
    """The account after one more event.

    Args:
      account: up to this event.
      name: of the event.
      fields: of the event.
      time: of the event, on the clock of the account.
    """
    goes_back = name == "restore_distrusted" and fields.get("to_step") is not None
    if name in _WORLD_ENDS or goes_back:
        ended = _ended(account, "end", time)
        return dataclasses.replace(ended, is_stepping=False)
    if account.is_stepping:
        return _after_in_steps(account, name, fields, time)
    if name not in _ENDS:
        return account
    cause = "wait" if account.is_waiting else _ENDS[name]
    ended = _ended(account, cause, time)
    if name == "step":
        return _with_step(ended, fields)
    return dataclasses.replace(ended, is_waiting=name == "waiting_for_slices")


def _after_in_steps(
    account: Account, name: str, fields: Mapping[str, storage.Json], time: float
) -> Account:
    if name == "step":
        is_new = int(str(fields["step"])) > account.newest_step
        cause = "productive" if is_new else "again"
        return _with_step(_ended(account, cause, time), fields)
    if name in _WITHIN:
        cause = _WITHIN[name]
        secs = account.within.get(cause, 0.0) + float(str(fields["secs"]))
        return dataclasses.replace(account, within={**account.within, cause: secs})
    if name in ("world_started", "run_started"):
        # The world before it ended without an event.
        ended = _ended(account, "end", time)
        return dataclasses.replace(ended, is_stepping=False)
    return account


def _with_step(account: Account, fields: Mapping[str, storage.Json]) -> Account:
    newest_step = max(account.newest_step, int(str(fields["step"])))
    return dataclasses.replace(account, newest_step=newest_step, is_stepping=True)


def _ended(account: Account, cause: str, time: float) -> Account:
    # Ends a part, without what has other causes.
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
