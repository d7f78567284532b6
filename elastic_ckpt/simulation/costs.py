"""The seconds that phases of a run take, and the bytes that hosts move in a second.

The defaults are the medians of our benchmarks, on two cores and a local disk
(docs/pages/reference/simulate.md names the figure of each). `measured` reads them from
the events and metrics of a real run, and `--cost` sets any of them by its name.

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
from typing import Any, TypeAlias

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.steps import read_plan

_MIB = 2**20
# An event, or a line of metrics.
_Record: TypeAlias = Mapping[str, Any]
# A metric that is recorded with an event has its time.
_SAME_SECS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a simulated run. Rates are in MiB/s of each host.

    Attributes:
      step_secs: a step on all slices that train at most.
      detect_secs: from the loss of a process until its world has ended.
      check_secs: from the return of a slice until it may be used.
      recheck_secs: until one is checked whose processes alone have died.
      decide_secs: until the slices of the next world are chosen.
      start_secs: until its processes have joined, after a loss.
      prepare_secs: until the job is assembled.
      restore_secs: of a restore, besides reading.
      load_secs: until the step is loaded as it was compiled before.
      compile_secs: until it is compiled.
      first_step_secs: of a world.
      leave_secs: of a planned change: from the last step until the hosts have left.
      planned_start_secs: as `start_secs`, of a world that was prepared.
      block_secs: that a save holds up the loop, besides copying.
      save_secs: until a step is committed in RAM, besides writing.
      copy_secs: until its copies are made, besides sending.
      backup_secs: until it is in storage, besides uploading.
      capture_mib_per_sec: copied while a save holds up the loop.
      write_mib_per_sec: written to the RAM disk.
      copy_mib_per_sec: received from peers.
      upload_mib_per_sec: to storage.
      local_mib_per_sec: read from the host's RAM.
      peer_mib_per_sec: read from peers.
      storage_mib_per_sec: read from storage.
      step_secs_by_slices: of a step on so many slices, where that was measured.
    """

    step_secs: float = 1.72
    detect_secs: float = 0.38
    check_secs: float = 5.0
    recheck_secs: float = 0.15
    decide_secs: float = 0.001
    start_secs: float = 0.25
    prepare_secs: float = 0.40
    restore_secs: float = 0.27
    load_secs: float = 0.45
    compile_secs: float = 13.4
    first_step_secs: float = 1.97
    leave_secs: float = 2.0
    planned_start_secs: float = 0.0
    block_secs: float = 0.0014
    save_secs: float = 0.0
    copy_secs: float = 0.05
    backup_secs: float = 0.1
    capture_mib_per_sec: float = 4190.0
    write_mib_per_sec: float = 1280.0
    copy_mib_per_sec: float = 735.0
    upload_mib_per_sec: float = 1040.0
    local_mib_per_sec: float = 2220.0
    peer_mib_per_sec: float = 735.0
    storage_mib_per_sec: float = 1040.0
    step_secs_by_slices: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def with_values(self, values: Mapping[str, float]) -> Costs:
        """The costs with other values, by their names.

        Raises:
          ConfigError: if there is no cost of a name, or a value is negative, or not
            above 0 for `step_secs` and rates.
        """
        names = [
            field.name
            for field in dataclasses.fields(self)
            if field.name != "step_secs_by_slices"
        ]
        for name, value in values.items():
            if name not in names:
                raise errors.ConfigError(
                    f"--cost {name}={value:g}: there is no such cost; the costs are"
                    f" {', '.join(names)}"
                )
            is_divisor = name == "step_secs" or name.endswith("_mib_per_sec")
            if value < 0 or (is_divisor and not value):
                raise errors.ConfigError(
                    f"--cost {name}={value:g}: choose a value above 0"
                )
        changed = dataclasses.replace(self, **values)
        if "step_secs" in values:
            # A chosen time of a step replaces those that were measured.
            changed = dataclasses.replace(changed, step_secs_by_slices={})
        return changed

    def step_secs_on(self, slices: int, *, rows_ratio: float) -> float:
        """The seconds of a step on a number of slices.

        Args:
          slices: of the world.
          rows_ratio: the rows that a device computes there, over those that it computes
            on all slices that train at most.
        """
        return self.step_secs_by_slices.get(slices, self.step_secs * rows_ratio)

    def read_secs(self, most: Sequence[int]) -> float:
        """The seconds in which a host reads bytes of each of `read_plan.NEARNESS`."""
        rates = (
            self.local_mib_per_sec,
            self.peer_mib_per_sec,
            self.peer_mib_per_sec,
            self.storage_mib_per_sec,
        )
        assert len(rates) == len(read_plan.NEARNESS)
        return sum(map(_secs, most, rates))

    def block_secs_of(self, host_bytes: float) -> float:
        """The seconds that a save holds up the loop."""
        return self.block_secs + _secs(host_bytes, self.capture_mib_per_sec)

    def save_secs_of(self, host_bytes: float) -> float:
        """The seconds until a step is committed in RAM."""
        return self.save_secs + _secs(host_bytes, self.write_mib_per_sec)

    def copy_secs_of(self, host_bytes: float, *, most_mib_per_sec: float) -> float:
        """The seconds until a host has the copies that it takes.

        Args:
          host_bytes: that it takes.
          most_mib_per_sec: the limit of `peer_max_mib_per_sec`; 0 sets none.
        """
        rate = min(self.copy_mib_per_sec, most_mib_per_sec or self.copy_mib_per_sec)
        return self.copy_secs + _secs(host_bytes, rate)

    def backup_secs_of(self, host_bytes: float) -> float:
        """The seconds until storage has what a host uploads."""
        return self.backup_secs + _secs(host_bytes, self.upload_mib_per_sec)


def _secs(size: float, mib_per_sec: float) -> float:
    return size / (mib_per_sec * _MIB)


# Costs by the event that has their seconds.
_SECS = {
    "executable_loaded": "load_secs",
    "compiled": "compile_secs",
    "save_blocked": "block_secs",
    "saved": "save_secs",
    "replicated": "copy_secs",
    "backed_up": "backup_secs",
}


def measured(
    events: Iterable[_Record], lines: Iterable[_Record], *, given: Costs
) -> Costs:
    """The costs of a run.

    Args:
      events: of the run, in order.
      lines: of the metrics of the run as a whole.
      given: the costs of what the run did not do, and the rates.

    Raises:
      RunError: if the run has trained no step.
    """
    lines = list(lines)
    taken: dict[str, list[float]] = collections.defaultdict(list)
    # The beginnings of worlds with their slices, and the ends of those that were left.
    worlds: list[tuple[float, int]] = []
    left: list[float] = []
    # When hosts were killed, and a slice was there; whether the change was planned.
    killed = there = None
    is_planned = False
    # Of the present world and of the one before.
    slices: set[int] = set()
    before: set[int] = set()
    for event in events:
        name, time = event["event"], event["time"]
        if name in _SECS:
            taken[_SECS[name]].append(event["secs"])
        elif name == "run_started":
            worlds.append((time, event["slices"]))
        elif name == "world_started":
            killed = None
            before, slices = slices, set(event["slices"])
        elif name == "fault_injected":
            killed = (killed or time) if event["kind"].startswith("kill_") else None
        elif name == "host_lost":
            is_planned = False
            if killed is not None:
                # Until its world has ended.
                taken["detect_secs"].append(time - killed)
                killed = None
        elif name in ("slice_lost", "slice_returned"):
            is_planned = is_planned and name != "slice_lost"
            there = time
        elif name == "world_leaving" and there is not None:
            # The hosts are asked to leave for the slice.
            taken["check_secs"].append(time - there)
            there = None
        elif name == "world_left":
            is_planned = True
            left.append(time)
        elif name == "recovered":
            there = None if there is None else max(there, time - event["secs"])
            kind = "planned" if is_planned else "lost"
            for phase in ("end", "start"):
                taken[f"{phase} {kind}"].append(event[f"{phase}_secs"])
            # The same slices were checked before they were used again.
            is_checked = not is_planned and slices >= before
            decided = "recheck_secs" if is_checked else "decide_secs"
            taken[decided].append(event["decide_secs"])
            for phase in ("prepare", "restore"):
                taken[f"{phase}_secs"].append(event[f"{phase}_secs"])
            taken["first_step_secs"].append(event["step_secs"])
    steps = _step_secs(worlds, lines)
    if not steps:
        raise errors.RunError(
            "the run of --costs has recorded no step; name one that has trained"
        )
    values = {name: _mean(secs) for name, secs in taken.items()}
    if taken["check_secs"]:
        values["check_secs"] = statistics.median(taken["check_secs"])
    if ends := taken.pop("end planned", []):
        values["leave_secs"] = statistics.median(ends)
    values |= {
        "step_secs": steps[max(steps)],
        "detect_secs": values.get("detect_secs") or values.get("end lost"),
        "start_secs": values.get("start lost"),
        "planned_start_secs": values.get("start planned"),
        "leave_secs": _mean(_leaves(left, lines)) or values.get("leave_secs"),
    }
    known = {
        name: value
        for name, value in values.items()
        if value is not None and " " not in name
    }
    costs = given.with_values(known)
    return dataclasses.replace(costs, step_secs_by_slices=steps)


def _step_secs(
    worlds: Sequence[tuple[float, int]], lines: Iterable[_Record]
) -> dict[int, float]:
    # By the number of slices, the mean of a step without saves.
    names = {metrics.GOODPUT_SECS[cause].name for cause in ("productive", "again")}
    sums: collections.Counter[int] = collections.Counter()
    counts: collections.Counter[int] = collections.Counter()
    for line in lines:
        before = [slices for time, slices in worlds if time <= line["time"]]
        if line["metric"] in names and before:
            sums[before[-1]] += line["sum"]
            counts[before[-1]] += line["count"]
    return {slices: sums[slices] / counts[slices] for slices in sorted(counts)}


def _leaves(left: Sequence[float], lines: Iterable[_Record]) -> list[float]:
    # From the last step of a world until its hosts have left.
    name = metrics.GOODPUT_SECS["end"].name
    return [
        line["sum"]
        for line in lines
        if line["metric"] == name and line["count"] == 1
        if any(abs(line["time"] - time) < _SAME_SECS for time in left)
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
