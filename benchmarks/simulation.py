"""Suite `simulation`: real runs beside `elastic-ckpt simulate` under the same faults.

Three runs of four processes lose and regain slices at random (suite `soak`, with fewer
faults). Each is simulated from the trace of its faults.

* `goodput_points_apart`: between a run's goodput and the simulated one, with costs
  that are measured from the run.
* `steps_lost_apart`: between the steps that both have trained again, a fault.
* `..._crossed`: the same with the costs of another one of the runs.
* `run_goodput_percent`: of the runs.

Months of 10,000 hosts are simulated by the command of
`docs/pages/reference/simulate.md`:

* `secs_10k`: 30 days.
"""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report, sized, soak
from elastic_ckpt.cli import simulate
from elastic_ckpt.core import storage
from elastic_ckpt.elastic import faults
from elastic_ckpt.inspect import run_files
from elastic_ckpt.simulation import cluster, decisions, simulated_run, study
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.simulated_run import Outcome
from elastic_ckpt.training import run_directory

_TRACE = "trace.jsonl"
# The state of the soaked model; its bytes cost next to nothing.
_STATE_BYTES = 2**21
_NUM_RUNS = sized(3, 2)
_NUM_EVENTS = sized(24, 4)
# 10,000 hosts, 100 slices, two of them spares.
_LARGE = (
    *("global_batch_size=0", "per_device_batch_size=3", "--hosts", "10000"),
    *("--slices", "100", "--state-gib", "1000", "--cost", "step_secs=10"),
    *("--vary", "spares=2", "--json"),
)
_PERIOD = "local_checkpoint_period=5"
# Other faults are no events of a trace.
_KINDS = {kind.value for kind in cluster.EventKind}


def costs_of(run: pathlib.Path) -> Costs:
    """The costs that the run in a directory has paid."""
    return simulate.of_run(str(run))


def simulated(run: pathlib.Path, costs: Costs) -> Outcome:
    """The run in a directory under its own faults, until it has done its steps.

    Its trace is written beside its events. The costs may be those of another run.
    """
    config = run_directory.read_config(str(run))
    plan = study.plan(config, study.Cluster(), costs=costs, state_bytes=_STATE_BYTES)
    size = plan.hardware
    trace = _trace_of(
        run_files.read_events(str(run)), hosts_per_slice=size.hosts_per_slice
    )
    storage.write_atomic(run / _TRACE, cluster.to_bytes(trace))
    return simulated_run.simulate(
        plan,
        cluster.read(str(run / _TRACE), size),
        decisions.Decisions(
            decisions.WorldLayout(state_bytes=_STATE_BYTES),
            study.copies(config),
        ),
    )


def _trace_of(
    events: Sequence[Mapping[str, Any]], *, hosts_per_slice: int
) -> list[cluster.Event]:
    # The faults of a run, by time. Hosts of faults are numbered as in the world that
    # runs; those of a trace as in the cluster.
    slices: Sequence[int] = ()
    trace = []
    for event in events:
        if event["event"] == "world_started":
            slices = event["slices"]
        if event["event"] != "fault_injected":
            continue
        kind, which = faults.Kind(event["kind"]), event["target"]
        if kind not in _KINDS:
            continue
        if kind in faults.OF_HOSTS:
            place, host = divmod(which, hosts_per_slice)
            if place >= len(slices):
                continue
            which = slices[place] * hosts_per_slice + host
        secs = event["time"] - events[0]["time"]
        what = cluster.EventKind(kind.value)
        trace.append(cluster.Event(time=secs, what=what, which=which))
    return trace


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    command = [sys.executable, "-m", "elastic_ckpt.cli.main", "simulate"]
    began = time.perf_counter()
    subprocess.run(
        [*command, str(soak.CONFIG), *_LARGE, "--days", sized("30", "1")],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    secs = time.perf_counter() - began
    month = report.figure("secs", "30 days, at most 60", [secs])
    return {"secs_10k": month} | _beside_runs()


def _beside_runs() -> dict[str, report.Figure]:
    seed = random.randrange(2**16)
    print(f"seed {seed}")
    listed = [soak.faults(_NUM_EVENTS, seed + number) for number in range(_NUM_RUNS)]
    figures: dict[str, report.Figure] = {}
    with tempfile.TemporaryDirectory() as directory:
        runs = [pathlib.Path(directory, str(n)) for n in range(_NUM_RUNS)]
        outcomes = list(map(_soaked, runs, listed))
        costs = [costs_of(run / soak.RUN) for run in runs]
        figures["run_goodput_percent"] = report.figure(
            "%", "no bound", [outcome.goodput_percent for outcome in outcomes]
        )
        # With its own costs, and with those of the run before.
        for ending, paid in (("", costs), ("_crossed", [costs[-1], *costs[:-1]])):
            results = [
                simulated(run / soak.RUN, each)
                for run, each in zip(runs, paid, strict=True)
            ]
            figures[f"goodput_points_apart{ending}"] = report.figure(
                "%",
                "of the time; at most 10",
                [
                    abs(result.goodput_percent - outcome.goodput_percent)
                    for result, outcome in zip(results, outcomes, strict=True)
                ],
            )
            figures[f"steps_lost_apart{ending}"] = report.figure(
                "steps",
                f"a fault, at most {_PERIOD}",
                list(map(_steps_lost_apart, results, outcomes, listed)),
            )
    return figures


def _soaked(directory: pathlib.Path, listed: list[dict[str, int]]) -> soak.Outcome:
    directory.mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram:
        return soak.soak(str(directory), ram, soak.CONFIG, listed)


def _steps_lost_apart(
    result: Outcome, outcome: soak.Outcome, listed: list[dict[str, int]]
) -> float:
    # A fault.
    lost = sum(each["steps_lost"] for each in outcome.named("recovered"))
    num_faults = sum("return_slice" not in fault for fault in listed)
    return abs(result.steps_lost - lost) / num_faults
