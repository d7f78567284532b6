"""Suite `recovery`: the costs of a change of slices, and those of the loop.

Four processes train a model with 267 MiB of state (weights and AdamW's moments), of
which each slice has a replica, by `elastic-ckpt train` with its defaults. Processes are
killed and stopped from outside, by their ids; all else is read from the run's events
and metrics. Beside the seconds stand the processor seconds and the load of the machine.

* `recover_secs`: from `kill -9` of a host to the first step of the next world, on the
  same slices, as the host's machine proves to be sound; `recover_..._secs`: its phases
  (`elastic.timeline`), where `detect` comes before them; `recover_cpu_secs`: of a host
  of the new world until then.
* `recover_over_bare_ratio`: what of it comes before the first step, over the time of a
  bare world of as many processes (`recovery_bare`), `bare_world_secs`.
* `recover_cold_secs`: the same where the slice is not used again and the program for
  the others is not compiled ahead; `recover_cold_over_compile_secs`: less the phases
  `restore` and `compile`.
* `shrink_pause_secs`: from the last step on four slices to the first on three, whose
  program was compiled ahead, as `elastic-ckpt scale` requests; `grow_pause_secs`: from
  three to four.
* `steps_lost`: at a kill at a random time; `steps_lost_uncopied`: those of them before
  a save that had begun and had no copies yet; `steps_lost_planned`: of a growth.
* `detect_secs`: until the death of a process is noticed; `detect_hang_over_timeout`:
  until a stopped process (SIGSTOP) is, less `elastic_heartbeat_timeout_seconds`.
* `ratio_full_restart_orbax`: a job on three processes that saves with plain Orbax, from
  the death of one to the first step when all were started anew, over `recover_secs`.
  `ratio_emergency_manager`: with Orbax's emergency CheckpointManager, on four. See
  `recovery_orbax`. NaN if it does not restart; the error is printed.
* `loop_overhead_percent`: what elastic_ckpt's loop adds to a step of 50 ms over a bare
  loop (`recovery_loops`), of a small model on as many processes;
  `loop_thread_percent`: in processor time of the loop's thread, which other processes
  of a busy machine hardly change; `loop_step_ms`: the step's real time here.
* `save_each_step_percent`: what a save of the large state to RAM in each step adds to
  the step. `save_cost_secs` is what one of few saves adds; from it comes
  `smallest_period_under_5_percent`, in steps.
* `compile_ahead_percent`: what compiling for three slices adds to a step meanwhile.

`goodput_percent` is a figure of suite `soak`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import (
    recovery_bare,
    recovery_loops,
    recovery_orbax,
    recovery_run,
    report,
)
from benchmarks.recovery_run import Change, Planned
from elastic_ckpt.elastic import timeline

_HOSTS = 4
_PERIOD = 10
_TIMEOUT_SECS = 30
_STEP_MS = 50
# Before the run, and as many after it.
_BARE_WORLDS = 5
_COMMON = {
    "hosts": _HOSTS,
    "slices": _HOSTS,
    "text_directory": "python-stdlib/email",
    "num_logical_shards": 24,
    "global_batch_size": 24,
    "elastic_enabled": True,
    # Fewer are of no use to this suite, and need not be compiled for.
    "elastic_min_slice_count": _HOSTS - 1,
    "elastic_heartbeat_timeout_seconds": _TIMEOUT_SECS,
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_period": _PERIOD,
    "multi_tier_checkpointing_backup_interval_steps": 10 * _PERIOD,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
      large: the model of most figures, by keys of the configuration.
      small: of the figure of the loop: its step takes about 50 ms.
      kills: of a host of the run.
      large_turns: of saves.
      small_turns: of the loop.
    """

    large: dict[str, int]
    small: dict[str, int]
    kills: int
    large_turns: recovery_loops.Turns
    small_turns: recovery_loops.Turns


FULL = Size(
    large={
        "base_emb_dim": 1024,
        "base_num_query_heads": 8,
        "head_dim": 128,
        "base_mlp_dim": 6144,
        "base_num_decoder_layers": 1,
        "max_target_length": 8,
        "num_logical_shards": 12,
        "global_batch_size": 12,
    },
    small={
        "base_emb_dim": 64,
        "base_mlp_dim": 256,
        "base_num_decoder_layers": 1,
        "max_target_length": 32,
    },
    kills=2,
    large_turns=recovery_loops.Turns(steps=10, rounds=2, periods=(1, 10)),
    small_turns=recovery_loops.Turns(steps=50, rounds=15),
)
# Shows that the suite runs, and measures nothing.
_TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "max_target_length": 8,
}
SMALL = Size(
    large=_TINY,
    small=_TINY,
    kills=1,
    large_turns=recovery_loops.Turns(steps=10, rounds=1, periods=(1, 10)),
    small_turns=recovery_loops.Turns(steps=10, rounds=1),
)


def measure(size: Size = FULL) -> dict[str, report.Figure]:
    """Runs the suite."""
    loads = [os.getloadavg()[0]]
    with (
        tempfile.TemporaryDirectory() as d,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        directory = pathlib.Path(d)
        common = _COMMON | {"grain_train_files": f"{d}/text.array_record"}

        def settings(keys: dict[str, int], name: str) -> dict[str, Any]:
            # A run that finds the memory of another would go on from it.
            memory = {"local_checkpoint_directory": f"{ram}/{name}"}
            return common | keys | memory

        figures = _warm(settings(size.large, "warm"), directory / "warm", size.kills)
        recover_secs = figures["recover_secs"].value
        figures |= _cold(settings(size.large, "cold"), directory / "cold")
        loads.append(os.getloadavg()[0])
        orbax = settings(size.large, "orbax")
        figures |= _beside_orbax(orbax, directory, ram, recover_secs)
        loads.append(os.getloadavg()[0])
        figures |= of_loop(
            recovery_loops.measure(
                settings(size.small, "small"), directory / "small", size.small_turns
            )
        )
        figures |= of_saves(
            recovery_loops.measure(
                settings(size.large, "large"), directory / "large", size.large_turns
            )
        )
    loads.append(os.getloadavg()[0])
    return figures | {
        "load": report.figure("processes", "running, in a minute; 4 are ours", loads)
    }


def _warm(
    settings: dict[str, Any], directory: pathlib.Path, kills: int
) -> dict[str, report.Figure]:
    lost: list[Change] = []
    shrunk: list[Planned] = []
    grown: list[Planned] = []
    bare_secs = _bare_secs()
    with recovery_run.live(settings, directory) as run:
        ready = _ready(run, after=0)
        for number in range(kills):
            time.sleep(random.uniform(0, _period_secs(run)))
            # Each slice once, so that none is quarantined; the last one is stopped.
            change = run.disturb(1 + number % (_HOSTS - 1), signal.SIGKILL)
            lost.append(change)
            _ready(run, after=run.events.index(change.recovered))
            shrunk.append(run.scale(_HOSTS - 1))
            grown.append(run.scale(_HOSTS))
            _ready(run, after=run.events.index(grown[-1].recovered))
        hung = run.disturb(0, signal.SIGSTOP)
    bare_secs += _bare_secs()
    times = run.step_times()
    compiled = run.named("compiled")[0]["time"]
    meanwhile = statistics.median(recovery_run.step_secs(times, compiled, ready))
    alone = statistics.median(recovery_run.step_secs(times, ready, lost[0].began))
    return (
        of_kills(lost)
        | of_bare(lost, bare_secs)
        | of_planned(times, shrunk=shrunk, grown=grown)
        | {
            "detect_hang_over_timeout_secs": report.figure(
                "s", "at most 1", [hung.detect_secs - _TIMEOUT_SECS]
            ),
            "compile_ahead_percent": report.figure(
                "%",
                "of a step, while the program for 3 slices is compiled",
                [_more_percent(meanwhile, alone)],
            ),
        }
    )


def _bare_secs() -> list[float]:
    recovery_bare.warm_up()
    # The fork server is still importing at the first one.
    return [recovery_bare.world_secs(_HOSTS) for _ in range(_BARE_WORLDS + 1)][1:]


def _ready(run: recovery_run.LiveRun, *, after: int) -> float:
    # The program for a slice fewer is there, and a save has its copies.
    ready = run.wait_for("compiled_ahead", after=after)
    run.wait_for("replicated", after=run.events.index(ready))
    return ready["time"]


def _period_secs(run: recovery_run.LiveRun) -> float:
    # Between the last two saves.
    while len(run.named("save_started")) < 2:
        run.wait_for("save_started", after=len(run.events))
    *_, before, last = [each["time"] for each in run.named("save_started")]
    return last - before


def _cold(
    settings: dict[str, Any], directory: pathlib.Path
) -> dict[str, report.Figure]:
    # On the same slices the program of the world before would be there.
    cold = settings | {
        "elastic_compile_ahead_seconds": 0,
        "elastic_quarantine_failures": 1,
    }
    with recovery_run.live(cold, directory) as run:
        run.wait_for("replicated")
        change = run.disturb(1, signal.SIGKILL)
    return of_cold([change])


def of_kills(changes: Sequence[Change]) -> dict[str, report.Figure]:
    """The figures of hosts that were killed, with the next program present."""
    secs = report.figure("s", "at most 3 on 2 idle cores", [c.secs for c in changes])
    figures = {
        "recover_secs": secs,
        "recover_cpu_secs": report.figure(
            "s", "of a host", [s for change in changes for s in change.cpu_secs]
        ),
        "detect_secs": report.figure(
            "s", "at most 0.2; in recover_secs", [c.detect_secs for c in changes]
        ),
    }
    for phase in timeline.PHASES:
        figures[f"recover_{phase}_secs"] = report.figure(
            "s", "in recover_secs", [c.recovered[f"{phase}_secs"] for c in changes]
        )
    lost = [change.steps_lost() for change in changes]
    return figures | {
        "steps_lost": report.figure(
            "steps",
            f"at most local_checkpoint_period={_PERIOD} and the next line",
            [total for total, _ in lost],
        ),
        "steps_lost_uncopied": report.figure(
            "steps", "of a save without copies yet", [uncopied for _, uncopied in lost]
        ),
    }


def of_bare(
    changes: Sequence[Change], bare_secs: Sequence[float]
) -> dict[str, report.Figure]:
    """The figures of recoveries beside bare worlds."""
    bare = statistics.median(bare_secs)
    return {
        "recover_over_bare_ratio": report.figure(
            "ratio",
            "at most 2; without the first step",
            [
                (change.secs - change.recovered["step_secs"]) / bare
                for change in changes
            ],
        ),
        "bare_world_secs": report.figure("s", "no bound", bare_secs),
    }


def of_planned(
    times: Sequence[tuple[float, int]],
    *,
    shrunk: Sequence[Planned],
    grown: Sequence[Planned],
) -> dict[str, report.Figure]:
    """The figures of changes that were requested.

    Args:
      times: of the steps of the run.
      shrunk: the changes to a slice less.
      grown: the changes to a slice more.
    """
    lost = [planned.recovered["steps_lost"] for planned in (*shrunk, *grown)]
    return {
        f"{name}_pause_secs": report.figure(
            "s",
            "at most recover_secs",
            [recovery_run.pause_secs(times, planned.started) for planned in changes],
        )
        for name, changes in (("shrink", shrunk), ("grow", grown))
    } | {"steps_lost_planned": report.figure("steps", "0", lost)}


def of_cold(changes: Sequence[Change]) -> dict[str, report.Figure]:
    """The figures of hosts that were killed, with no program present."""
    compiled = [
        change.recovered["compile_secs"] + change.recovered["restore_secs"]
        for change in changes
    ]
    secs = [change.secs for change in changes]
    return {
        "recover_cold_secs": report.figure(
            "s", "on a slice fewer, nothing compiled", secs
        ),
        "recover_cold_over_compile_secs": report.figure(
            "s",
            "at most 1.5; without compiling and restoring",
            [a - b for a, b in zip(secs, compiled, strict=True)],
        ),
    }


def of_loop(turns: dict[str, list[float]]) -> dict[str, report.Figure]:
    """The figures of turns with a small model."""
    bare, loop = recovery_loops.BARE, recovery_loops.LOOP
    of_thread = recovery_loops.thread_of
    return {
        "loop_overhead_percent": report.figure(
            "%",
            f"below 1; of a step of {_STEP_MS} ms",
            _percent_of_step(turns[loop], turns[bare]),
        ),
        "loop_thread_percent": report.figure(
            "%",
            f"processor time of the loop's thread; of a step of {_STEP_MS} ms",
            _percent_of_step(turns[of_thread(loop)], turns[of_thread(bare)]),
        ),
        "loop_step_ms": report.figure(
            "ms", "the bare step", [1000 * s for s in turns[recovery_loops.BARE]]
        ),
    }


def _percent_of_step(more: Sequence[float], less: Sequence[float]) -> list[float]:
    pairs = zip(more, less, strict=True)
    return [100 * 1000 * (a - b) / _STEP_MS for a, b in pairs]


def of_saves(turns: dict[str, list[float]]) -> dict[str, report.Figure]:
    """The figures of turns with the large model; periods are their names."""
    step_secs = turns[recovery_loops.LOOP]
    periods = sorted(int(name) for name in turns if name.isdigit())
    each, longest = turns[str(periods[0])], turns[str(periods[-1])]
    costs = [
        max(0.0, (with_saves - step) * periods[-1])
        for with_saves, step in zip(longest, step_secs, strict=True)
    ]
    return {
        "large_step_ms": report.figure("ms", "no save", [1000 * s for s in step_secs]),
        "save_each_step_percent": report.figure(
            "%",
            "of a step; a save to RAM in each",
            [_more_percent(a, b) for a, b in zip(each, step_secs, strict=True)],
        ),
        "save_cost_secs": report.figure(
            "s", f"of a save, each {periods[-1]} steps", costs
        ),
        "smallest_period_under_5_percent": report.figure(
            "steps",
            "from save_cost_secs",
            [
                smallest_period(cost, step)
                for cost, step in zip(costs, step_secs, strict=True)
            ],
        ),
    }


def smallest_period(cost_secs: float, step_secs: float, *, percent: float = 5) -> int:
    """The least steps between saves at which these cost less than `percent`."""
    return 1 + math.floor(cost_secs / (step_secs * percent / 100))


def _beside_orbax(
    settings: dict[str, Any], directory: pathlib.Path, ram: str, recover_secs: float
) -> dict[str, report.Figure]:
    figures = {}
    for name, manager, hosts, place in (
        ("ratio_full_restart_orbax", "plain", _HOSTS - 1, directory),
        ("ratio_emergency_manager", "emergency", _HOSTS, pathlib.Path(ram)),
    ):
        config = directory / f"{manager}.yml"
        cached = {"jax_cache_dir": f"{directory}/{manager}_cache"}
        config.write_text(json.dumps(settings | cached))
        try:
            secs = recovery_orbax.restart_secs(
                manager, config, place / manager, hosts=hosts
            )
        except recovery_orbax.RestartError as error:
            print(f"{name}: it does not work here:\n{error}")
            secs = math.nan
        least = 6 if manager == "plain" else 9
        what = f"at least {least}; {secs:.1f} s on {hosts} processes, over recover_secs"
        figures[name] = report.figure("ratio", what, [secs / recover_secs])
    return figures


def _more_percent(more: float, less: float) -> float:
    return 100 * (more / less - 1)
