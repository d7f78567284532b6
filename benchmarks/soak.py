"""Suite `soak`: one run that loses and regains slices a hundred times, unattended.

Faults are drawn at random, from a seed that is printed: a slice is killed with its
memory, a slice comes back, the process of a host is killed, a host is stopped
(SIGSTOP). They come at a distance of a few steps, so that some hit a run that has not
recovered from the last one. Afterwards the run is audited.

* `examples_lost`, `examples_repeated`: by the audit; 0.
* `committed_steps_lost`: worlds that began before a step that had its copies; 0.
* `processes_left`: of the run, when it has ended; 0.
* `steps_lost`: of each change, trained again.
* `recover_secs`: of each change, from the failure to the first step.
* `goodput_percent`: of the run's time, the part that trained new steps
  (`elastic_ckpt.monitoring.goodput` has the formula).
* `load`: of the machine, before and after.
"""

from __future__ import annotations

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

from benchmarks import report
from elastic_ckpt.inspect import run_files

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "demo_cpu.yml"
_NUM_EVENTS = 100
_NUM_SLICES = 4
_LEAST_SLICES = 2
_STEPS_BETWEEN = (8, 30)
# The name of a run.
RUN = "soak"
_MARK = "ELASTIC_CKPT_SOAK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The remains of a soaked run.

    Attributes:
      audit: of the run, as `elastic-ckpt audit --json` prints it.
      events: of the run, in order.
      goodput_percent: of its time.
      processes_left: ids.
    """

    audit: dict[str, Any]
    events: list[dict[str, Any]]
    goodput_percent: float
    processes_left: list[int]

    def named(self, name: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [event for event in self.events if event["event"] == name]

    def committed_steps_lost(self) -> int:
        """The worlds that began before a step that had all of its copies."""
        newest = lost = 0
        for event in self.events:
            if event["event"] in ("replicated", "backed_up"):
                newest = max(newest, event["step"])
            elif event["event"] == "run_started":
                lost += event["start_step"] < newest
        return lost


def faults(num_events: int, seed: int) -> list[dict[str, int]]:
    """Random faults, by their steps; at least `_LEAST_SLICES` slices are always there.

    Args:
      num_events: how many; those that bring a slice back at the end are added.
      seed: of the draw.
    """
    draw = random.Random(seed)
    there, gone, step = set(range(_NUM_SLICES)), set[int](), 0
    listed = []
    for number in range(num_events):
        step += draw.randint(*_STEPS_BETWEEN)
        kinds = ["kill_host", "hang_host"]
        kinds += ["kill_slice"] * 2 * (len(there) > _LEAST_SLICES)
        kinds += ["return_slice"] * 3 * bool(gone)
        kind = draw.choice(kinds)
        if number == num_events - 1 and gone:
            kind = "return_slice"
        if kind == "kill_slice":
            target = draw.choice(sorted(there))
            there.remove(target)
            gone.add(target)
        elif kind == "return_slice":
            target = draw.choice(sorted(gone))
            gone.remove(target)
            there.add(target)
        else:
            target = draw.randrange(_LEAST_SLICES)
        listed.append({kind: target, "at_step": step})
    return listed


def soak(
    directory: str, ram: str, config: pathlib.Path, listed: list[dict[str, int]]
) -> Outcome:
    """Trains through faults, and audits what is left.

    Args:
      directory: of the run's files, empty.
      ram: a directory on a RAM disk, empty.
      config: of the run.
      listed: the faults.

    Raises:
      RuntimeError: if a command fails, with its output.
    """
    run = pathlib.Path(directory, RUN)
    mark = f"{_MARK}={uuid.uuid4()}"
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
    _command(
        "train",
        config,
        *(f"{key}={value}" for key, value in settings.items()),
        mark=mark,
    )
    left = _processes(mark)
    audit = json.loads(_command("audit", run, "--json", mark=mark))
    lines = (run / "events.jsonl").read_text().splitlines()
    return Outcome(
        audit=audit,
        events=list(map(json.loads, lines)),
        goodput_percent=_goodput_percent(run),
        processes_left=left,
    )


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    seed = random.randrange(2**16)
    listed = faults(_NUM_EVENTS, seed)
    print(f"seed {seed}: {json.dumps(listed)}")
    loads = [os.getloadavg()[0]]
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        outcome = soak(directory, ram, CONFIG, listed)
    loads.append(os.getloadavg()[0])
    changes = outcome.named("recovered")
    return {
        "events": report.figure("faults and returns", f"seed {seed}", [len(listed)]),
        "worlds": report.figure(
            "worlds", "of one run", [len(outcome.named("world_started"))]
        ),
        "examples_lost": report.figure("examples", "0", [outcome.audit["num_lost"]]),
        "examples_repeated": report.figure(
            "examples", "0", [outcome.audit["num_repeated"]]
        ),
        "committed_steps_lost": report.figure(
            "worlds", "0", [outcome.committed_steps_lost()]
        ),
        "processes_left": report.figure(
            "processes", "0", [len(outcome.processes_left)]
        ),
        "steps_lost": report.figure(
            "steps",
            "local_checkpoint_period=5",
            [each["steps_lost"] for each in changes],
        ),
        "recover_secs": report.figure(
            "s", "a change", [each["secs"] for each in changes]
        ),
        "goodput_percent": report.figure(
            "%", "of the run's time", [outcome.goodput_percent]
        ),
        "load": report.figure("processes", "running, in a minute", loads),
    }


def _command(*arguments: object, mark: str) -> str:
    name, _, value = mark.partition("=")
    ended = subprocess.run(
        [sys.executable, "-m", "elastic_ckpt.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {name: value},
    )
    if ended.returncode:
        raise RuntimeError(f"{arguments[0]} failed: {ended.stdout}{ended.stderr}")
    return ended.stdout


def _processes(mark: str) -> list[int]:
    # The processes that have the mark in their environment.
    left = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                left.append(int(entry.name))
        except OSError:
            # It has ended, or is another user's.
            continue
    return left


def _goodput_percent(run: pathlib.Path) -> float:
    name = "/elastic_ckpt/goodput/percent"
    recorded = run_files.read_metrics(run / "metrics", last_bytes=2**20)["run"]
    return [each["last"] for each in recorded if each["metric"] == name][-1]
