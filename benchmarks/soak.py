"""Suite `soak`: an unattended run with a hundred faults, on disk and in buckets.

Faults are drawn at random, from a seed that is printed: a slice is killed with its
memory; one host process is killed (half of the time process 0), or two simultaneously;
a host is frozen (SIGSTOP). Slices come back. Faults follow each other within a few
steps, so that some hit a run that has not recovered from the last one. Afterwards, the
run is audited.

One run keeps its steps on disk, one in `gs://` and one in `s3://` (emulators in another
process); the suffixes are `_gs` and `_s3`.

* `faults`: the number of faults, without returns; 100.
* `examples_lost`, `examples_repeated`: according to the audit; 0.
* `committed_steps_lost`: worlds that began before a step that had its copies; 0.
* `processes_left`: processes of the run after its end; 0.
* `steps_lost`: steps retrained per change.
* `recover_secs`: time from the failure to the first step, per change.
* `goodput_percent`: the share of the run's time that trained new steps
  (`elastic_ckpt.monitoring.goodput` has the formula).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import uuid
from typing import Any
from unittest import mock

from benchmarks import report, sized, storage
from elastic_ckpt.inspect import run_files

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "demo_cpu.yml"
_NUM_FAULTS = sized(100, 2)
_NUM_SLICES = 4
_LEAST_SLICES = 2
_STEPS_BETWEEN = (8, 30)
# The run name.
RUN = "soak"
_MARK = "ELASTIC_CKPT_SOAK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The remains of a soaked run."""

    audit: dict[str, Any]  # as `elastic-ckpt audit --json` prints it
    events: list[dict[str, Any]]
    goodput_percent: float
    processes_left: list[int]

    def named(self, name: str) -> list[dict[str, Any]]:
        """The events with this name."""
        return [event for event in self.events if event["event"] == name]

    def committed_steps_lost(self) -> int:
        """The number of worlds that began before a step that had all its copies."""
        newest = lost = 0
        for event in self.events:
            if event["event"] in ("replicated", "backed_up"):
                newest = max(newest, event["step"])
            elif event["event"] == "run_started":
                lost += event["start_step"] < newest
        return lost


class _Draw(random.Random):
    # Draws faults and returns of slices.

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.there, self.gone = set(range(_NUM_SLICES)), set[int]()

    def lost(self) -> int:
        # A slice to lose.
        self.gone.add(lost := self.choice(sorted(self.there)))
        self.there.remove(lost)
        return lost

    def back(self) -> int:
        # A slice to bring back.
        self.there.add(back := self.choice(sorted(self.gone)))
        self.gone.remove(back)
        return back

    def host(self) -> int:
        # A host that exists: the hosts of the minimum number of slices always do.
        return self.randrange(_LEAST_SLICES)


def faults(num_events: int, seed: int) -> list[dict[str, int]]:
    """Random faults by step; at least `_LEAST_SLICES` slices are always available.

    The last fault is a return if a slice is gone.
    """
    draw, step = _Draw(seed), 0
    listed = []
    for number in range(num_events):
        step += draw.randint(*_STEPS_BETWEEN)
        kinds = ["kill_host", "hang_host"]
        kinds += ["kill_slice"] * 2 * (len(draw.there) > _LEAST_SLICES)
        kinds += ["return_slice"] * 3 * bool(draw.gone)
        kind = draw.choice(kinds)
        if number == num_events - 1 and draw.gone:
            kind = "return_slice"
        which = {"kill_slice": draw.lost, "return_slice": draw.back}
        listed.append({kind: which.get(kind, draw.host)(), "at_step": step})
    return listed


def mixed_faults(num_faults: int, seed: int) -> list[dict[str, Any]]:
    """Random faults of all kinds, with returns of slices between them."""
    draw, step, num = _Draw(seed), 0, 0
    listed: list[dict[str, Any]] = []
    while num < num_faults or draw.gone:
        step += draw.randint(*_STEPS_BETWEEN)
        kinds = ["return"] * 6 * bool(draw.gone)
        if num < num_faults:
            kinds += ["kill_host", "hang_host"]
            kinds += ["hosts"] * (num < num_faults - 1)
            kinds += ["kill_slice"] * (len(draw.there) > _LEAST_SLICES)
        kind, host = draw.choice(kinds), draw.host()
        match kind:
            case "return":
                found = [{"return_slice": draw.back()}]
            case "kill_slice":
                found = [{kind: draw.lost()}]
            case "hosts":
                found = [{"kill_host": 0}, {"kill_host": 1}]
            case _:
                found = [{kind: host}]
        num += len(found) * (kind != "return")
        listed += [each | {"at_step": step} for each in found]
    return listed


def soak(
    directory: str, ram: str, config: pathlib.Path, listed: list[dict[str, Any]]
) -> Outcome:
    """Trains through the listed faults and audits the result.

    The run's files are in `directory`, a path or a bucket URL, and in `ram`, a
    directory on a RAM disk; both are initially empty.
    """
    run = f"{directory}/{RUN}"
    mark = f"{uuid.uuid4()}"
    settings = {
        "run_name": RUN,
        "base_output_directory": directory,
        "hosts": _NUM_SLICES,
        "slices": _NUM_SLICES,
        "steps": listed[-1]["at_step"] + 200,
        "faults": json.dumps(listed),
        "elastic_enabled": True,
        "elastic_min_slice_count": _LEAST_SLICES,
        "elastic_settle_seconds": 0,
        "elastic_heartbeat_timeout_seconds": 10,
        "elastic_max_retries": 20,
        "elastic_quarantine_failures": 0,
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 5,
        "peer_copies": 2,
        "multi_tier_checkpointing_backup_interval_steps": 20,
    }
    _command(mark, "train", config, *(f"{k}={value}" for k, value in settings.items()))
    left = _processes(mark)
    name = "/elastic_ckpt/goodput/percent"
    recorded = run_files.read_metrics(f"{run}/metrics", last_bytes=2**20)["run"]
    return Outcome(
        audit=json.loads(_command(mark, "audit", run, "--json")),
        events=run_files.read_events(run),
        goodput_percent=[r["last"] for r in recorded if r["metric"] == name][-1],
        processes_left=left,
    )


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    figures: dict[str, report.Figure] = {}
    with storage.stores() as environment, mock.patch.dict(os.environ, environment):
        for ending, scheme in (("", ""), ("_gs", "gs://"), ("_s3", "s3://")):
            with tempfile.TemporaryDirectory() as directory:
                bucket = f"{scheme}{environment['BUCKET']}/soak"
                named = _measure(bucket if scheme else directory)
            figures |= {f"{name}{ending}": each for name, each in named.items()}
    return figures


def _measure(directory: str) -> dict[str, report.Figure]:
    seed = random.randrange(2**16)
    listed = mixed_faults(_NUM_FAULTS, seed)
    print(f"{directory}, seed {seed}: {json.dumps(listed)}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram:
        outcome = soak(directory, ram, CONFIG, listed)
    injected = collections.Counter(
        event["kind"] for event in outcome.named("fault_injected")
    )
    print(f"{directory}: {dict(injected)}")
    audit, changes = outcome.audit, outcome.named("recovered")
    figure = report.figure
    return {
        "faults": figure(
            "faults",
            f"{_NUM_FAULTS}, seed {seed}",
            [injected.total() - injected["return_slice"]],
        ),
        "worlds": figure("worlds", "in one run", [len(outcome.named("world_started"))]),
        "examples_lost": figure("examples", "0", [audit["num_lost"]]),
        "examples_repeated": figure("examples", "0", [audit["num_repeated"]]),
        "committed_steps_lost": figure("worlds", "0", [outcome.committed_steps_lost()]),
        "processes_left": figure("processes", "0", [len(outcome.processes_left)]),
        "steps_lost": figure(
            "steps",
            "local_checkpoint_period=5",
            [each["steps_lost"] for each in changes],
        ),
        "recover_secs": figure("s", "per change", [each["secs"] for each in changes]),
        "goodput_percent": figure("%", "of the run time", [outcome.goodput_percent]),
    }


def _command(mark: str, *arguments: object) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "elastic_ckpt.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {_MARK: mark},
    )
    if ended.returncode:
        raise RuntimeError(f"{arguments[0]} failed: {ended.stdout}{ended.stderr}")
    return ended.stdout


def _processes(mark: str) -> list[int]:
    # The processes that have the mark in their environment.
    wanted = f"{_MARK}={mark}".encode()
    left = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        # The process may have exited or belong to another user.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                left.append(int(entry.name))
    return left
