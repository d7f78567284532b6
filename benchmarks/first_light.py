"""Suite `first_light`: the demo of the README, and what `next()` costs when colocated.

* `demo_secs`: the whole demo as a person starts it, the training file not yet written.
* `first_step_secs`: from the same command to the first step in the log.
* `colocated_next_ratio`: `next()` of `RemoteIterator`, which hands over global
  arrays on the devices, over `next()` of the very Grain iterator that it runs, called
  in process, which hands over NumPy rows. Both give the batches of the demo, in turns.
* `in_process_next_ratio`: likewise `ec.data.Batches`; the difference of the two is what
  colocated Python itself adds.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import report, turns

_DEMO = pathlib.Path(__file__).parent.parent / "configs" / "demo_cpu.yml"
_NUM_DEMOS = 3
_NUM_ROUNDS = 15
_BATCHES_A_ROUND = 40


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    first_steps, wholes = zip(*(_time_demo() for _ in range(_NUM_DEMOS)), strict=True)
    return {
        "demo_secs": report.figure("s", "at most 90 on 2 cores", wholes),
        "first_step_secs": report.figure("s", "at most 20 on 2 cores", first_steps),
        **_nexts(),
    }


def _time_demo() -> tuple[float, float]:
    # Seconds to the first step and to the end, in an empty working directory.
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        command = [sys.executable, "-m", "elastic_ckpt.cli.main", "train", str(_DEMO)]
        # Otherwise the next demo would continue from what this one leaves there.
        command.append(f"local_checkpoint_directory={ram}")
        log = pathlib.Path(directory, "runs/demo_cpu/step_log/attempt-00001.jsonl")
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=directory, stdout=subprocess.DEVNULL
        ) as demo:
            while demo.poll() is None and not _has_a_step(log):
                time.sleep(0.02)
            first_step_secs = time.monotonic() - began
            if demo.wait():
                raise RuntimeError(f"the demo failed: {' '.join(command)}")
        return first_step_secs, time.monotonic() - began


def _has_a_step(log: pathlib.Path) -> bool:
    # The first line is the attempt itself.
    return log.exists() and log.read_bytes().count(b"\n") > 1


def _nexts() -> dict[str, report.Figure]:
    import jax
    from elastic_ckpt_sidecar import RemoteIterator

    from elastic_ckpt.core import topology
    from elastic_ckpt.data import iterator, positional_data, rows
    from elastic_ckpt.data.lm import text
    from elastic_ckpt.training import load

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

    def taken(batches: Any) -> Callable[[], None]:
        def take() -> None:
            for _ in range(_BATCHES_A_ROUND):
                jax.block_until_ready(next(batches))

        return take

    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/python_stdlib.array_record"
        text.write_arrayrecord(text.PYTHON_STDLIB, file)
        config = load.load(_DEMO, [f"grain_train_files={file}"])
        data = positional_data.from_config(config.data)
        mesh = topology.mesh_of(topology.present(config.world.slices))
        size = config.data.global_batch_size
        placement = rows.Placement.in_order(0, num_hosts=1, global_batch_size=size)
        secs = turns.timed(
            {
                "colocated": taken(
                    RemoteIterator(data, mesh=mesh, global_batch_size=size)
                ),
                "in_process": taken(
                    iterator.Batches(data, mesh=mesh, global_batch_size=size)
                ),
                "grain": taken(data.host_batches(placement)),
            },
            _NUM_ROUNDS,
        )
    return {
        f"{name}_next_ratio": report.ratio(
            secs[name], secs["grain"], "the same Grain iterator called in process"
        )
        for name in ("colocated", "in_process")
    }
