"""The costs of a real run, from its events and metrics.

Phases of changes are those of the events `recovered`, separately for losses and planned
changes. Times are means, because their sum is what a run pays. Rates of reading and
writing are not measured: the bytes of the simulated state take time at the given rates,
besides the times of the run. Measure with a small state, or on machines of the kind.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.simulation.costs import Costs

Event = Mapping[str, Any]
# Costs by the phase of `recovered`, after any change.
_PHASES = {"decide_secs": "decide_secs", "prepare_secs": "prepare_secs"}
_SAVES = {
    "block_secs": "save_blocked",
    "save_secs": "saved",
    "copy_secs": "replicated",
    "backup_secs": "backed_up",
}
# A metric that is recorded with an event has its time.
_SAME_SECS = 0.05
_LOSSES = ("host_lost", "slice_lost")


def measured(
    events: Sequence[Event], lines: Sequence[Mapping[str, Any]], *, given: Costs
) -> Costs:
    """The costs of a run.

    Args:
      events: of the run, in order.
      lines: of the metrics of the run as a whole.
      given: the costs of what the run did not do, and the rates.

    Raises:
      RunError: if the run has trained no step.
    """
    steps = _step_secs(events, lines)
    if not steps:
        raise errors.RunError(
            "the run of --costs has recorded no step; name one that has trained"
        )
    changes = list(_changes(events))
    values: dict[str, float | None] = {
        "step_secs": steps[max(steps)],
        "detect_secs": _mean(_detections(events)) or _mean(_ends(changes)),
        "check_secs": _median(_checks(events)),
        "start_secs": _mean(
            each["start_secs"] for each, is_planned in changes if not is_planned
        ),
        "planned_start_secs": _mean(
            each["start_secs"] for each, is_planned in changes if is_planned
        ),
        "leave_secs": _mean(_leaves(events, lines))
        or _median(each["end_secs"] for each, is_planned in changes if is_planned),
        "first_step_secs": _mean(each["step_secs"] for each, _ in changes),
        "restore_secs": _mean(each["restore_secs"] for each, _ in changes),
        "load_secs": _mean(_named(events, "executable_loaded")),
        "compile_secs": _mean(_named(events, "compiled")),
        "compile_ahead_secs": _mean(_named(events, "compiled_ahead")),
        **{
            cost: _mean(each[phase] for each, _ in changes)
            for cost, phase in _PHASES.items()
        },
        **{cost: _mean(_named(events, name)) for cost, name in _SAVES.items()},
    }
    known = {name: value for name, value in values.items() if value is not None}
    costs = given.with_values(known)
    return dataclasses.replace(costs, step_secs_by_slices=steps)


def _step_secs(
    events: Sequence[Event], lines: Iterable[Mapping[str, Any]]
) -> dict[int, float]:
    # By the number of slices, the mean of a step without saves.
    worlds = [
        (each["time"], each["slices"])
        for each in events
        if each["event"] == "run_started"
    ]
    names = {metrics.GOODPUT_SECS[cause].name for cause in ("productive", "again")}
    sums: collections.Counter[int] = collections.Counter()
    counts: collections.Counter[int] = collections.Counter()
    for line in lines:
        before = [slices for time, slices in worlds if time <= line["time"]]
        if line["metric"] in names and before:
            sums[before[-1]] += line["sum"]
            counts[before[-1]] += line["count"]
    return {slices: sums[slices] / counts[slices] for slices in sorted(counts)}


def _changes(events: Sequence[Event]) -> Iterable[tuple[Event, bool]]:
    # The events `recovered`, and whether the change was planned.
    is_planned = False
    for event in events:
        if event["event"] in _LOSSES:
            is_planned = False
        elif event["event"] == "world_left":
            is_planned = True
        elif event["event"] == "recovered":
            yield event, is_planned


def _ends(changes: Iterable[tuple[Event, bool]]) -> list[float]:
    return [each["end_secs"] for each, is_planned in changes if not is_planned]


def _detections(events: Sequence[Event]) -> Iterable[float]:
    # From a fault that kills hosts until its world has ended.
    killed: float | None = None
    for event in events:
        if event["event"] == "fault_injected" and event["kind"].startswith("kill_"):
            killed = killed or event["time"]
        elif event["event"] == "fault_injected" or event["event"] == "world_started":
            killed = None
        elif event["event"] == "host_lost" and killed is not None:
            yield event["time"] - killed
            killed = None


def _checks(events: Sequence[Event]) -> Iterable[float]:
    # From the moment a slice is there until the hosts are asked to leave for it.
    since: float | None = None
    for event in events:
        if event["event"] in ("slice_returned", "slice_lost"):
            since = event["time"]
        elif event["event"] == "recovered" and since is not None:
            since = max(since, event["time"] - event["secs"])
        elif event["event"] == "world_leaving" and since is not None:
            yield event["time"] - since
            since = None


def _leaves(
    events: Sequence[Event], lines: Iterable[Mapping[str, Any]]
) -> Iterable[float]:
    # From the last step of a world until its hosts have left.
    left = [each["time"] for each in events if each["event"] == "world_left"]
    name = metrics.GOODPUT_SECS["end"].name
    for line in lines:
        is_left = any(abs(line["time"] - time) < _SAME_SECS for time in left)
        if line["metric"] == name and line["count"] == 1 and is_left:
            yield line["sum"]


def _named(events: Sequence[Event], name: str) -> list[float]:
    return [each["secs"] for each in events if each["event"] == name]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None
