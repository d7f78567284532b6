"""Suite `verdicts`: each fault is injected ten times, and its verdicts are checked.

Process faults are injected into real processes (`verdict_worlds` and the supervisor's
own `faults`). Faults that need broken hardware are injected into the functions that
record them (`verdict_records`), in scripted worlds under the real loop of a run. Hosts,
steps and phases are drawn at random, from a seed that is printed. The judge sees only
the records of the run.

* `verdicts_right_percent`: the percentage of injected faults whose last verdict has the
  right kind and identifies the right host, slice, machine or file, with no wrong
  verdict before. Also prints the confusion matrix: the injected and the judged kinds.
* `verdict_secs`: from when the run noticed a fault (the death of a process, an error,
  an exceeded time limit) to its verdict, in real processes.
* `healthy_verdicts`: the number of 20 healthy runs with a verdict; 0.
* `kinds`, `kinds_in_processes`: the number of injected kinds.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import report, sized, verdict_records, verdict_worlds
from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import decision, failures, faults, processes, runtime, watch

_TIMES = sized(10, 1)
_HEALTHY = sized(20, 1)
_SLICES = 3
_KINDS = {kind.name: kind for kind in failures.KINDS}
_NUMBERED = ("host", "slice", "machine", "device")
_NUMBERED_LINKS = ("host_cut_off", "host_unreachable")
# A slice check takes up to ten seconds on a busy machine.
_HANG = watch.Limits(most_secs=20.0, heartbeat_secs=60.0)
_SILENT = watch.Limits(most_secs=120.0, heartbeat_secs=5.0)
_PATIENT = watch.Limits(most_secs=120.0, heartbeat_secs=60.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcesses:
    """A fault in real processes, from `verdict_worlds` or the supervisor's `faults`."""

    fault: str = ""
    everywhere: bool = False
    injected: str = ""
    limits: watch.Limits = _PATIENT
    late_secs: float = 0.0  # from the fault's begin until it is noticed


_hangs = functools.partial(InProcesses, limits=_HANG, late_secs=_HANG.most_secs)
_everywhere = functools.partial(InProcesses, everywhere=True)
# By verdict kind and variant.
IN_PROCESSES: dict[str, InProcesses] = {
    "host_killed": InProcesses(fault="kill"),
    "host_killed: others": InProcesses(fault="hang_up"),
    "host_crashed": InProcesses(fault="segfault"),
    "host_crashed: memory": InProcesses(fault="bus_error"),
    "host_exited": InProcesses(fault="exit"),
    "host_stopped": InProcesses(
        fault="stop", limits=_SILENT, late_secs=_SILENT.heartbeat_secs
    ),
    "host_hangs": _hangs(fault="hang"),
    "world_hangs": _hangs(fault="hang", everywhere=True),
    "world_hangs: compile": _hangs(fault="hang_in_compile", everywhere=True),
    "restore_hangs": _hangs(fault="hang_in_restore"),
    "slice_lost": InProcesses(injected="kill_slice"),
    "program_failed": _everywhere(fault="raise"),
    "program_failed: on one host": InProcesses(fault="raise"),
    "program_crashes": _everywhere(fault="segfault"),
    "program_exits": _everywhere(fault="exit"),
    "not_importable": _everywhere(fault="import"),
    "device_memory_exhausted": _everywhere(fault="need_device_memory"),
    "program_failed: memory": _everywhere(fault="need_memory"),
    "program_failed: files": _everywhere(fault="open_files"),
    "program_failed: a full disk": _everywhere(fault="fill_disk"),
    "program_failed: a service": _everywhere(fault="use_service"),
    "program_failed: a name": _everywhere(fault="resolve"),
    "data_unusable: missing": _everywhere(fault="read_missing_data"),
    "data_unusable: damaged": _everywhere(fault="read_damaged_data"),
    "step_unreadable": _everywhere(fault="load_nothing"),
    "wrong_configuration": _everywhere(fault="configure_wrongly"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A fault and the verdicts on it."""

    meant: str  # the fault's kind and variant
    verdicts: Sequence[dict[str, Any]]
    host: int
    secs: float = 0.0  # from the time of notice to the verdict; 0 in scripted worlds
    failed: str = ""  # why the run ended

    @property
    def said(self) -> str:
        """The kind of the last verdict."""
        return self.verdicts[-1]["kind"] if self.verdicts else "nothing"

    @property
    def is_right(self) -> bool:
        """Whether each verdict is right and identifies what has failed."""
        meant = self.meant.partition(":")[0]
        kinds = [meant] * max(1, len(self.verdicts))
        if meant == "fails_again":
            kinds = ["device_failed", meant]
        return [each["kind"] for each in self.verdicts] == kinds and self._is_named()

    def _is_named(self) -> bool:
        said, which = self.verdicts[-1]["kind"], self.verdicts[-1]["which"]
        if said == "slice_restarted":
            return True
        if _KINDS[said].what in _NUMBERED or said in _NUMBERED_LINKS:
            return str(self.host) in which.split()
        if "missing" in self.meant or "damaged" in self.meant:
            return "array_record" in which or "/nowhere" in which
        return True


class _Said:
    # An `Emit` that keeps the verdicts, with the time of each.
    def __init__(self) -> None:
        self.verdicts: list[dict[str, Any]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        events.check(name, fields)
        if name == "verdict":
            self.verdicts.append({**fields, "at": time.time()})


def in_processes(kind: str, draw: random.Random) -> Judged:
    """Injects a fault into real processes and returns the verdicts on it."""
    case = IN_PROCESSES[kind]
    host, at_step = draw.randrange(_SLICES), draw.randint(2, 40)
    injected = []
    if case.injected:
        injected = [faults.Fault(kind=case.injected, target=host, at_step=at_step)]
    train = functools.partial(
        verdict_worlds.train,
        fault=case.fault,
        host=-1 if case.everywhere else host,
        at_step=at_step,
        # The supervisor injects a fault a few steps later.
        steps=2000 if injected else at_step + 2,
    )
    said = _Said()
    failed = _run(train, said, limits=case.limits, injected=injected)
    secs = 0.0
    if said.verdicts:
        first = said.verdicts[0]
        secs = first["at"] - first["since"] - case.late_secs
    return Judged(
        meant=kind, verdicts=said.verdicts, host=host, secs=secs, failed=failed
    )


def in_records(meant: str, draw: random.Random) -> Judged:
    """Records a fault in scripted worlds and returns the verdicts on it."""
    kind = meant.partition(":")[0]
    cluster = verdict_records.ScriptedCluster(
        draw,
        verdict_records.RECORDS[meant],
        gone=kind in verdict_records.GONE,
        is_machine=kind == "machine_lost",
    )
    said, failed = _Said(), ""
    try:
        runtime.run(print, cluster=cluster, emit=said)
    except errors.ElasticCkptError as error:
        failed = str(error)
    return Judged(meant=meant, verdicts=said.verdicts, host=cluster.host, failed=failed)


def healthy(draw: random.Random) -> list[dict[str, Any]]:
    """Runs without faults, with possible slice changes; returns the verdicts."""
    said = _Said()
    policies = [decision.Policy(max_slices=n, settle_secs=0) for n in (3, 2, 1, 3)]
    present = policies[:1]

    def emit(name: str, **fields: Any) -> None:
        said(name, **fields)
        # An operator wants a different number of slices now and then.
        if name == "step_done" and draw.random() < 0.01:
            present[0] = draw.choice(policies)

    train = functools.partial(
        verdict_worlds.train,
        fault="",
        host=0,
        at_step=0,
        steps=draw.choice([5, 100, 300]),
    )
    failed = _run(train, emit, policy=lambda: present[0])
    if failed:
        raise RuntimeError(f"a healthy run failed: {failed}")
    return said.verdicts


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    seed = random.randrange(2**16)
    print(f"seed {seed}\n{'meant':<38} right  judged")
    draw = random.Random(seed)
    real = _injected(in_processes, IN_PROCESSES, draw)
    judged = [*real, *_injected(in_records, verdict_records.RECORDS, draw)]
    well = [healthy(draw) for _ in range(_HEALTHY)]
    for each in judged:
        if not each.is_right:
            print(f"host {each.host}, {each.meant}: {each.verdicts}")
    right = 100 * sum(each.is_right for each in judged) / len(judged)
    kinds = {each.meant.partition(":")[0] for each in judged}
    return {
        "verdicts_right_percent": report.figure("%", "at least 95", [right]),
        "verdict_secs": report.figure(
            "s", "at most 5, in real processes", [each.secs for each in real]
        ),
        "healthy_verdicts": report.figure(
            "runs", f"0 of {_HEALTHY}", [sum(map(bool, well))]
        ),
        "kinds": report.figure("kinds of faults", "at least 30", [len(kinds)]),
        "kinds_in_processes": report.figure(
            "kinds of faults", "at least 15", [len(IN_PROCESSES)]
        ),
    }


def _injected(
    inject: Callable[[str, random.Random], Judged],
    kinds: dict[str, Any],
    draw: random.Random,
) -> list[Judged]:
    # Prints the confusion matrix: the verdicts on each kind.
    judged = []
    for kind in kinds:
        of_kind = [inject(kind, draw) for _ in range(_TIMES)]
        said = collections.Counter(each.said for each in of_kind)
        right = sum(each.is_right for each in of_kind)
        told = ", ".join(f"{name} {times}" for name, times in said.most_common())
        print(f"{kind:<38} {right:>5}  {told}", flush=True)
        judged += of_kind
    return judged


def _run(
    train: Callable[..., object],
    emit: events.Emit,
    *,
    limits: watch.Limits = _PATIENT,
    injected: Sequence[faults.Fault] = (),
    policy: Callable[[], decision.Policy] | None = None,
) -> str:
    # Why the run failed; empty if it did not.
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.closing(
            processes.Processes(
                slices=_SLICES, logs=directory, limits=limits, injected=injected
            )
        ) as cluster,
    ):
        try:
            runtime.run(
                train,
                cluster=cluster,
                policy=policy or decision.Policy(settle_secs=0),
                emit=emit,
            )
        except errors.ElasticCkptError as error:
            return str(error)
    return ""
