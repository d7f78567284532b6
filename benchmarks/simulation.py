"""Suite `simulation`: real runs compared with `elastic-ckpt simulate`.

Real runs of four processes lose and regain slices at random (suite `soak`, with fewer
faults). Each run is simulated with the failures in its log and with its own costs.

* `goodput_points_apart`: the difference between the real and the simulated goodput.
* `steps_lost_apart`: the difference between the numbers of retrained steps, per fault.
* `run_goodput_percent`: the goodput of the real runs.
* `secs_10k`: the time to simulate 30 days of 10,000 hosts in four settings.
"""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
import tempfile
import time

from benchmarks import report, sized, soak
from elastic_ckpt.cli import simulate
from elastic_ckpt.inspect import run_files
from elastic_ckpt.simulation import failures, plan, simulated_cluster
from elastic_ckpt.training import journal

# The state of the soaked model; its bytes cost almost nothing.
_STATE_BYTES = 2**21
_NUM_RUNS = sized(3, 2)
_NUM_EVENTS = sized(24, 4)
# 10,000 hosts, 100 slices, two of them spares.
_LARGE = (
    *("hosts=10000", "slices=100", "elastic_max_slice_count=98"),
    *("global_batch_size=0", "per_device_batch_size=3", "max_shard_reads=10000"),
    *("--state-gib", "1000", "--cost", "step_secs=10", "--json"),
)
_PERIOD = "local_checkpoint_period=5"


def simulated(run: pathlib.Path) -> simulated_cluster.Outcome:
    """Simulates the run in a directory with its own failures and costs."""
    planned = plan.of_config(
        journal.read_config(str(run)),
        costs=simulate.of_run(str(run)),
        state_bytes=_STATE_BYTES,
    )
    trace = failures.of_log(
        run_files.read_events(str(run)),
        slices=planned.slices,
        hosts_per_slice=planned.hosts_per_slice,
    )
    return simulated_cluster.simulate(planned, trace)


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
    month = report.figure("secs", "30 days, four settings, at most 60", [secs])
    return {"secs_10k": month} | _beside_runs()


def _beside_runs() -> dict[str, report.Figure]:
    seed = random.randrange(2**16)
    print(f"seed {seed}")
    listed = [soak.faults(_NUM_EVENTS, seed + number) for number in range(_NUM_RUNS)]
    figures: dict[str, report.Figure] = {}
    with tempfile.TemporaryDirectory() as directory:
        runs = [pathlib.Path(directory, str(n)) for n in range(_NUM_RUNS)]
        outcomes = list(map(_soaked, runs, listed))
        figures["run_goodput_percent"] = report.figure(
            "%", "no bound", [outcome.goodput_percent for outcome in outcomes]
        )
        results = [simulated(run / soak.RUN) for run in runs]
        figures["goodput_points_apart"] = report.figure(
            "%",
            "percentage points; at most 10",
            [
                abs(result.goodput_percent - outcome.goodput_percent)
                for result, outcome in zip(results, outcomes, strict=True)
            ],
        )
        figures["steps_lost_apart"] = report.figure(
            "steps",
            f"per fault; at most {_PERIOD}",
            list(map(_steps_lost_apart, results, outcomes, listed)),
        )
    return figures


def _soaked(directory: pathlib.Path, listed: list[dict[str, int]]) -> soak.Outcome:
    directory.mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram:
        return soak.soak(str(directory), ram, soak.CONFIG, listed)


def _steps_lost_apart(
    result: simulated_cluster.Outcome,
    outcome: soak.Outcome,
    listed: list[dict[str, int]],
) -> float:
    # Per fault.
    lost = sum(each["steps_lost"] for each in outcome.named("recovered"))
    num_faults = sum("return_slice" not in fault for fault in listed)
    return abs(result.steps_lost - lost) / num_faults
