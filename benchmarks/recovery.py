"""Suite `recovery`: the costs of slice changes and of the training loop.

Four processes train a model with 267 MiB of state (weights and AdamW's moments) using
`elastic-ckpt train` with its defaults; each slice has a replica of the state. Processes
are killed from outside, by process id; everything else is read from the run's events
and metrics.

* `recover_secs`: from `kill -9` of a host to the first step of the next world, on the
  same slices, because the host's machine proves to be sound. `recover_..._secs`: the
  phases of the recovery (`monitoring.goodput`), preceded by `detect_secs`, the time
  until the death of the process is noticed.
* `recover_over_bare_ratio`: the recovery before the first step, relative to a bare
  world with the same number of processes (`recovery_bare`).
* `recover_cold_secs`: the same if the slice is not used again and the program for the
  remaining slices has yet to be compiled; `recover_cold_over_compile_secs`: without the
  phases `restore` and `compile`.
* `shrink_pause_secs`: from the last step on four slices to the first on three, after a
  request by `elastic-ckpt scale`; the first of these pauses compiles the program for
  three slices. `grow_pause_secs`: from three slices to four.
* `steps_lost`: the steps lost when a host is killed at a random time.
* `ratio_full_restart_orbax`: the recovery of a job on three processes that saves with
  stock Orbax, from the death of one process to the first step after all were restarted,
  relative to `recover_secs`. `ratio_emergency_manager`: with Orbax's emergency
  CheckpointManager, on four processes. See `recovery_orbax`. NaN if the job does not
  restart; the error is printed.
* `loop_thread_percent`: the time that elastic_ckpt's loop adds to a step of 50 ms
  relative to a bare loop, for a small model on the same number of processes. The loops
  take turns with the same compiled step and the same batches. The figure is processor
  time of the loop's thread, which other processes on a busy machine hardly affect.
* `large_step_ms`: a step of the large model in elastic_ckpt's loop, without saves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import recovery_bare, recovery_orbax, report, sized, turns
from elastic_ckpt.core import events
from elastic_ckpt.elastic import scale_request
from elastic_ckpt.elastic.world import World
from elastic_ckpt.inspect import run_files
from elastic_ckpt.monitoring import goodput
from elastic_ckpt.training import launch, load, schema

Event = dict[str, Any]

_HOSTS = 4
_PERIOD = 10
_STEP_MS = 50
# Worlds before the run, and the same number after it.
_BARE_WORLDS = 5
_KILLS = sized(2, 1)
# The pause between checks of the events; the events' times do not depend on it.
_LOOK_SECS = 0.2
# The time limit for a run's next event, on a machine that is ten times slower.
_PATIENCE_SECS = 600.0
_COMMON = {
    "hosts": _HOSTS,
    "slices": _HOSTS,
    # Trains until it is stopped.
    "steps": 10**6,
    "text_directory": "python-stdlib/email",
    "num_logical_shards": 24,
    "global_batch_size": 24,
    "elastic_enabled": True,
    # This suite cannot use fewer slices.
    "elastic_min_slice_count": _HOSTS - 1,
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_period": _PERIOD,
    "multi_tier_checkpointing_backup_interval_steps": 10 * _PERIOD,
}
_TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "max_target_length": 8,
}
# The model of most figures.
_LARGE = {
    "base_emb_dim": 1024,
    "base_num_query_heads": 8,
    "head_dim": 128,
    "base_mlp_dim": 6144,
    "base_num_decoder_layers": 1,
    "max_target_length": 8,
    "num_logical_shards": 12,
    "global_batch_size": 12,
}
# The model of the loop's figure: its step takes about 50 ms.
_SMALL = {
    "base_emb_dim": 64,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 1,
    "max_target_length": 32,
}


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    with (
        tempfile.TemporaryDirectory() as d,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):

        def config(name: str, model: dict[str, int], **more: Any) -> pathlib.Path:
            settings = {
                **_COMMON,
                **sized(model, _TINY),
                "run_name": name,
                "base_output_directory": d,
                "grain_train_files": f"{d}/text.array_record",
                # A run would continue from another run's memory if it found any.
                "local_checkpoint_directory": f"{ram}/{name}",
                **more,
            }
            path = pathlib.Path(d, f"{name}.yml")
            # JSON is YAML.
            path.write_text(json.dumps(settings))
            return path

        figures = _warm(config("warm", _LARGE))
        # On the same slices, the program of the previous world would be available.
        cold = {"elastic_quarantine_failures": 1}
        figures |= _cold(config("cold", _LARGE, **cold))
        for name, manager, hosts, least in (
            ("ratio_full_restart_orbax", "plain", _HOSTS - 1, 6),
            ("ratio_emergency_manager", "emergency", _HOSTS, 9),
        ):
            made = config(manager, _LARGE, jax_cache_dir=f"{d}/{manager}_cache")
            place = pathlib.Path(d if manager == "plain" else ram, "orbax", manager)
            secs = recovery_orbax.restart_secs(manager, made, place, hosts=hosts)
            figures[name] = report.figure(
                "ratio",
                f"at least {least}; {secs:.1f} s on {hosts} processes, over"
                " recover_secs",
                [secs / figures["recover_secs"].value],
            )
        alone = {"enable_checkpointing": False}
        small = _loops(config("small", _SMALL, **alone), *sized((50, 15), (5, 1)))
        large = _loops(config("large", _LARGE, **alone), *sized((10, 2), (5, 1)))
    pairs = zip(small["loop thread"], small["bare thread"], strict=True)
    return figures | {
        "loop_thread_percent": report.figure(
            "%",
            f"processor time of the loop's thread; of a step of {_STEP_MS} ms",
            [100 * 1000 * (loop - bare) / _STEP_MS for loop, bare in pairs],
        ),
        "large_step_ms": report.figure(
            "ms", "no save", [1000 * each for each in large["loop"]]
        ),
    }


class _Run:
    # A run that trains in another process. Host processes are found by the logs that
    # they write to.

    def __init__(self, config: pathlib.Path) -> None:
        self.directory = config.with_suffix("")
        self._output = config.with_suffix(".txt")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic_ckpt.cli.main", "train", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def named(self, name: str) -> list[Event]:
        read = run_files.read_events(str(self.directory))
        return [event for event in read if event["event"] == name]

    def wait_for(self, name: str, *, after: float = 0.0) -> Event:
        # The first event with this name after a time.
        until = time.monotonic() + _PATIENCE_SECS
        while True:
            for event in self.named(name):
                if event["time"] > after:
                    return event
            if self.process.poll() is not None or time.monotonic() > until:
                shown = self._output.read_text()[-3000:]
                raise RuntimeError(f"the run has no event {name!r}:\n{shown}")
            time.sleep(_LOOK_SECS)

    def wait_until_ready(self, *, after: float = 0.0) -> None:
        # Waits until a save has its copies.
        self.wait_for("replicated", after=after)

    def kill(self, host: int) -> Event:
        # The event after the next world's first step, with the seconds until then.
        process = self._hosts()[host]
        began = time.time()
        os.kill(process, signal.SIGKILL)
        recovered = self.wait_for("recovered", after=began)
        return {**recovered, "recover_secs": recovered["time"] - began}

    def scale(self, slices: int) -> Event:
        # The next world's `world_started` event, once that world has recovered.
        asked = time.time()
        scale_request.write(self.directory, slices)
        started = self.wait_for("world_started", after=asked)
        self.wait_for("recovered", after=asked)
        return started

    def pauses_secs(self, worlds: list[Event]) -> list[float]:
        # How long no step was completed around each `world_started` event.
        recorded = run_files.read_metrics(self.directory / "metrics")["run"]
        name = "/elastic_ckpt/train/steps"
        steps = [each["time"] for each in recorded if each["metric"] == name]
        return [
            min(each for each in steps if each > started["time"])
            - max(each for each in steps if each <= started["time"])
            for started in worlds
        ]

    def _hosts(self) -> dict[int, int]:
        # The host processes of the running world, by host number: the oldest of each.
        worlds: dict[str, dict[int, int]] = {}
        logs = self.directory / "logs"
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                log = pathlib.Path(os.readlink(entry / "fd" / "1"))
                if log.parent.parent == logs and log.stem.startswith("host-"):
                    host = int(log.stem.removeprefix("host-"))
                    worlds.setdefault(log.parent.name, {})[host] = int(entry.name)
        return worlds[min(worlds)]


@contextlib.contextmanager
def _live(config: pathlib.Path) -> Iterator[_Run]:
    # The run is stopped at the end of the block.
    run = _Run(config)
    try:
        yield run
    finally:
        run.process.terminate()
        try:
            run.process.wait(_PATIENCE_SECS)
        finally:
            run.process.kill()
            run.process.wait()


def _warm(config: pathlib.Path) -> dict[str, report.Figure]:
    lost, shrunk, grown = [], [], []
    bare_secs = recovery_bare.worlds_secs(_HOSTS, _BARE_WORLDS)
    with _live(config) as run:
        run.wait_until_ready()
        for number in range(_KILLS):
            # At any time between saves.
            while len(saves := run.named("save_started")) < 2:
                time.sleep(_LOOK_SECS)
            time.sleep(random.uniform(0, saves[-1]["time"] - saves[-2]["time"]))
            # Each slice once, so that none is quarantined.
            lost.append(run.kill(1 + number % (_HOSTS - 1)))
            run.wait_until_ready(after=lost[-1]["time"])
            shrunk.append(run.scale(_HOSTS - 1))
            grown.append(run.scale(_HOSTS))
            run.wait_until_ready(after=grown[-1]["time"])
    bare_secs += recovery_bare.worlds_secs(_HOSTS, _BARE_WORLDS)
    bare = statistics.median(bare_secs)
    against = "at most recover_secs"
    figures = {
        "recover_secs": report.figure(
            "s", "at most 2.5 on 2 idle cores", [each["recover_secs"] for each in lost]
        ),
        "detect_secs": report.figure(
            "s",
            "at most 0.2; part of recover_secs",
            [each["recover_secs"] - each["secs"] for each in lost],
        ),
        "steps_lost": report.figure(
            "steps",
            f"local_checkpoint_period={_PERIOD}, plus a save still without copies",
            [each["steps_lost"] for each in lost],
        ),
        "recover_over_bare_ratio": report.figure(
            "ratio",
            "at most 2.2 on 2 cores, 1.4 on 16; without the first step",
            [(each["recover_secs"] - each["step_secs"]) / bare for each in lost],
        ),
        "shrink_pause_secs": report.figure("s", against, run.pauses_secs(shrunk)),
        "grow_pause_secs": report.figure("s", against, run.pauses_secs(grown)),
    }
    for phase in goodput.PHASES:
        name = f"{phase}_secs"
        figures[f"recover_{name}"] = report.figure(
            "s", "part of recover_secs", [each[name] for each in lost]
        )
    return figures


def _cold(config: pathlib.Path) -> dict[str, report.Figure]:
    with _live(config) as run:
        run.wait_for("replicated")
        change = run.kill(1)
    secs = change["recover_secs"]
    rest = secs - change["compile_secs"] - change["restore_secs"]
    return {
        "recover_cold_secs": report.figure(
            "s", "on one slice fewer, nothing compiled", [secs]
        ),
        "recover_cold_over_compile_secs": report.figure(
            "s", "at most 1.5; without compiling and restoring", [rest]
        ),
    }


def _loops(config: pathlib.Path, steps: int, rounds: int) -> turns.Secs:
    # The seconds per step in each turn of `steps` steps, for the sides `bare` and
    # `loop`; `bare thread` and `loop thread` are the loop thread's processor seconds.
    prepared = launch.with_files(load.load(config), report=print)
    results = config.with_suffix(".json")
    train = functools.partial(_train, results, steps, rounds)
    launch.warm_up()
    launch.on_hosts(prepared, events.nobody, train=train)
    return json.loads(results.read_text())


def _train(
    results: pathlib.Path, steps: int, rounds: int, config: schema.Config, world: World
) -> None:
    import jax
    from jax.experimental import multihost_utils

    from elastic_ckpt.core import topology
    from elastic_ckpt.training.trainer import assembled

    trainer = assembled(config, world)
    with trainer.run as run:
        state = trainer.restore()
        compiled = world.compiled(trainer.program.step, state, next(trainer.batches))

        def bare(state: Any) -> Any:
            for _ in range(steps):
                state, _ = compiled(state, next(trainer.batches))
            return state

        def loop(state: Any) -> Any:
            start = int(state["step"])
            run._begin(start)
            return trainer.loop(state, start_step=start, steps=start + steps).state

        sides: dict[str, Callable[[Any], Any]] = {"bare": bare, "loop": loop}
        secs: turns.Secs = {}
        for name in [*sides] * (rounds + 1):
            multihost_utils.sync_global_devices(name)
            began, thread_began = time.perf_counter(), time.thread_time()
            state = jax.block_until_ready(sides[name](state))
            took = time.perf_counter() - began
            thread_took = time.thread_time() - thread_began
            secs.setdefault(name, []).append(took / steps)
            secs.setdefault(f"{name} thread", []).append(thread_took / steps)
        trainer.close()
    if topology.is_primary():
        counted = {name: samples[1:] for name, samples in secs.items()}
        results.write_text(json.dumps(counted))
