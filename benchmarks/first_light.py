"""Suite `first_light`: the demo of the README.

* `demo_secs`: the whole demo as a user starts it, before the training file is written.
* `first_step_secs`: from the same command to the first step in the log.

Suite `sidecar` measures the cost of a colocated `next()`.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import report, sized

_DEMO = pathlib.Path(__file__).parent.parent / "configs" / "demo_cpu.yml"
_NUM_DEMOS = sized(3, 1)


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    first_steps, wholes = zip(*(_time_demo() for _ in range(_NUM_DEMOS)), strict=True)
    return {
        "demo_secs": report.figure("s", "at most 90 on 2 cores", wholes),
        "first_step_secs": report.figure("s", "at most 20 on 2 cores", first_steps),
    }


def _time_demo() -> tuple[float, float]:
    # Seconds to the first step and to the end, in an empty working directory.
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        command = [sys.executable, "-m", "elastic_ckpt.cli.main", "train", str(_DEMO)]
        # Otherwise the next demo would continue from the steps of this one.
        command.append(f"local_checkpoint_directory={ram}")
        log = pathlib.Path(directory, "runs/demo_cpu/step_log/attempt-00001.jsonl")
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=directory, stdout=subprocess.DEVNULL
        ) as demo:
            # The first line is the attempt itself.
            while demo.poll() is None and not (
                log.exists() and log.read_bytes().count(b"\n") > 1
            ):
                time.sleep(0.02)
            first_step_secs = time.monotonic() - began
            if demo.wait():
                raise RuntimeError(f"the demo failed: {' '.join(command)}")
        return first_step_secs, time.monotonic() - began
