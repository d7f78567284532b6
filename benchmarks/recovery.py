"""Suite `recovery`: the costs of a change of slices, and those of the loop.

Four processes train a model with 267 MiB of state (weights and AdamW's moments), of
which each slice has a replica, by `elastic-ckpt train` with its defaults. Processes are
killed from outside, by their ids; all else is read from the run's events and metrics.

* `recover_secs`: from `kill -9` of a host to the first step of the next world, on the
  same slices, as the host's machine proves to be sound; `recover_..._secs`: its phases
  (`elastic.timeline`), where `detect_secs` comes before them, until the death of a
  process is noticed.
* `recover_over_bare_ratio`: what of it comes before the first step, over the time of a
  bare world of as many processes (`recovery_bare`).
* `recover_cold_secs`: the same where the slice is not used again and the program for
  the others is not compiled ahead; `recover_cold_over_compile_secs`: less the phases
  `restore` and `compile`.
* `shrink_pause_secs`: from the last step on four slices to the first on three, whose
  program was compiled ahead, as `elastic-ckpt scale` requests; `grow_pause_secs`: from
  three to four.
* `steps_lost`: at a kill at a random time.
* `ratio_full_restart_orbax`: a job on three processes that saves with plain Orbax, from
  the death of one to the first step when all were started anew, over `recover_secs`.
  `ratio_emergency_manager`: with Orbax's emergency CheckpointManager, on four. See
  `recovery_orbax`. NaN if it does not restart; the error is printed.
* `loop_thread_percent`: what elastic_ckpt's loop adds to a step of 50 ms over a bare
  loop (`recovery_loops`), of a small model on as many processes, in processor time of
  the loop's thread, which other processes of a busy machine hardly change.
* `large_step_ms`: a step of the large model in that loop, without saves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import (
    recovery_bare,
    recovery_loops,
    recovery_orbax,
    recovery_run,
    report,
)
from benchmarks.recovery_run import Change
from elastic_ckpt.elastic import timeline

_HOSTS = 4
_PERIOD = 10
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
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_period": _PERIOD,
    "multi_tier_checkpointing_backup_interval_steps": 10 * _PERIOD,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    large: dict[str, int]  # the model of most figures, by keys of the configuration
    small: dict[str, int]  # of the figure of the loop: its step takes about 50 ms
    kills: int  # of a host
    large_turns: tuple[int, int]  # of the loop: steps, and how many are counted
    small_turns: tuple[int, int]


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
    large_turns=(10, 2),
    small_turns=(50, 15),
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
SMALL = Size(large=_TINY, small=_TINY, kills=1, large_turns=(5, 1), small_turns=(5, 1))


def measure(size: Size = FULL) -> dict[str, report.Figure]:
    """Runs the suite."""
    with (
        tempfile.TemporaryDirectory() as d,
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
    ):
        directory = pathlib.Path(d)

        def settings(keys: dict[str, int], name: str) -> dict[str, Any]:
            return {
                **_COMMON,
                **keys,
                "grain_train_files": f"{d}/text.array_record",
                # A run that finds the memory of another would go on from it.
                "local_checkpoint_directory": f"{ram}/{name}",
            }

        def loops(keys: dict[str, int], name: str, turns: tuple[int, int]) -> Any:
            return recovery_loops.measure(
                settings(keys, name), directory / name, *turns
            )

        figures = _warm(settings(size.large, "warm"), directory / "warm", size.kills)
        figures |= _cold(settings(size.large, "cold"), directory / "cold")
        figures |= _beside_orbax(
            settings(size.large, "orbax"),
            {"plain": directory, "emergency": pathlib.Path(ram)},
            figures["recover_secs"].value,
        )
        small = loops(size.small, "small", size.small_turns)
        large = loops(size.large, "large", size.large_turns)
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


def _warm(
    settings: dict[str, Any], directory: pathlib.Path, kills: int
) -> dict[str, report.Figure]:
    lost: list[Change] = []
    started: dict[str, list[recovery_run.Event]] = {"shrink": [], "grow": []}
    bare_secs = recovery_bare.worlds_secs(_HOSTS, _BARE_WORLDS)
    with recovery_run.live(settings, directory) as run:
        _ready(run, after=0)
        for number in range(kills):
            time.sleep(random.uniform(0, _period_secs(run)))
            # Each slice once, so that none is quarantined.
            change = run.disturb(1 + number % (_HOSTS - 1), signal.SIGKILL)
            lost.append(change)
            _ready(run, after=run.events.index(change.recovered))
            started["shrink"].append(run.scale(_HOSTS - 1))
            started["grow"].append(run.scale(_HOSTS))
            _ready(run, after=run.events.index(started["grow"][-1]))
    bare_secs += recovery_bare.worlds_secs(_HOSTS, _BARE_WORLDS)
    times = run.step_times()
    return (
        _of_kills(lost)
        | {
            "recover_over_bare_ratio": report.figure(
                "ratio",
                "at most 2; without the first step",
                [
                    (change.secs - change.recovered["step_secs"])
                    / statistics.median(bare_secs)
                    for change in lost
                ],
            )
        }
        | {
            f"{name}_pause_secs": report.figure(
                "s",
                "at most recover_secs",
                [recovery_run.pause_secs(times, each) for each in worlds],
            )
            for name, worlds in started.items()
        }
    )


def _ready(run: recovery_run.LiveRun, *, after: int) -> None:
    # The program for a slice fewer is there, and a save has its copies.
    ready = run.wait_for("compiled_ahead", after=after)
    run.wait_for("replicated", after=run.events.index(ready))


def _period_secs(run: recovery_run.LiveRun) -> float:
    # Between the last two saves.
    while len(run.named("save_started")) < 2:
        run.wait_for("save_started", after=len(run.events))
    *_, before, last = [each["time"] for each in run.named("save_started")]
    return last - before


def _of_kills(changes: Sequence[Change]) -> dict[str, report.Figure]:
    figures = {
        "recover_secs": report.figure(
            "s", "at most 3 on 2 idle cores", [change.secs for change in changes]
        ),
        "detect_secs": report.figure(
            "s", "at most 0.2; in recover_secs", [c.detect_secs for c in changes]
        ),
        "steps_lost": report.figure(
            "steps",
            f"local_checkpoint_period={_PERIOD}, and a save without copies yet",
            [change.recovered["steps_lost"] for change in changes],
        ),
    }
    for phase in timeline.PHASES:
        figures[f"recover_{phase}_secs"] = report.figure(
            "s", "in recover_secs", [c.recovered[f"{phase}_secs"] for c in changes]
        )
    return figures


def _cold(
    settings: dict[str, Any], directory: pathlib.Path
) -> dict[str, report.Figure]:
    # On the same slices the program of the world before would be there.
    cold = {"elastic_compile_ahead_seconds": 0, "elastic_quarantine_failures": 1}
    with recovery_run.live(settings | cold, directory) as run:
        run.wait_for("replicated")
        change = run.disturb(1, signal.SIGKILL)
    phases = change.recovered["compile_secs"] + change.recovered["restore_secs"]
    return {
        "recover_cold_secs": report.figure(
            "s", "on a slice fewer, nothing compiled", [change.secs]
        ),
        "recover_cold_over_compile_secs": report.figure(
            "s", "at most 1.5; without compiling and restoring", [change.secs - phases]
        ),
    }


def _beside_orbax(
    settings: dict[str, Any], places: Mapping[str, pathlib.Path], recover_secs: float
) -> dict[str, report.Figure]:
    figures = {}
    for name, manager, hosts, least in (
        ("ratio_full_restart_orbax", "plain", _HOSTS - 1, 6),
        ("ratio_emergency_manager", "emergency", _HOSTS, 9),
    ):
        config = places["plain"] / f"{manager}.yml"
        cached = {"jax_cache_dir": f"{places['plain']}/{manager}_cache"}
        config.write_text(json.dumps(settings | cached))
        try:
            secs = recovery_orbax.restart_secs(
                manager, config, places[manager] / manager, hosts=hosts
            )
        except recovery_orbax.RestartError as error:
            print(f"{name}: it does not work here:\n{error}")
            secs = math.nan
        what = f"at least {least}; {secs:.1f} s on {hosts} processes, over recover_secs"
        figures[name] = report.figure("ratio", what, [secs / recover_secs])
    return figures
