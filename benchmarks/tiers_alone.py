"""Sides of suite `tiers` in one process, on whatever devices JAX finds here.

Ours has a RAM disk and storage, and Orbax storage; all are directories on the RAM disk.
The sides take turns. Prints the secs and bytes of each round, by side, as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from benchmarks import process_memory, report
from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

Samples = dict[str, list[float]]
_Sample = tuple[str, float]
_SIDES = ("ours", "orbax")


class _Sides:
    """Both checkpointers; each step that is saved replaces the one before."""

    def __init__(self, directory: str) -> None:
        keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
        made = frontend.Checkpointer(
            [
                choices.Local(f"{directory}/ram"),
                choices.Persistent(f"{directory}/storage", every=1, keep=keep),
            ],
            run="benchmark",
        )
        self.ours = made
        self.orbax = ocp.training.Checkpointer(
            f"{directory}/orbax", preservation_policy=keep
        )
        self._steps = itertools.count(1)

    def begin(self, side: str, state: Any) -> Callable[[], Any]:
        """Begins a save; what it returns waits until the step is in storage."""
        if side == "none":
            return lambda: None
        checkpointer = self.ours if side == "ours" else self.orbax
        response = checkpointer.save_checkpointables_async(
            next(self._steps), {"state": state}, force=True
        )
        assert response is not None

        def wait() -> None:
            assert response.result()
            if side == "ours":
                self.ours.wait()

        return wait

    def load(self, side: str, state: Any) -> None:
        """Loads the newest step of a side, ours from RAM."""
        checkpointer = self.ours if side == "ours" else self.orbax
        loaded = checkpointer.load_checkpointables(None, {"state": state})
        jax.block_until_ready(loaded)

    def close(self) -> None:
        self.ours.close()
        self.orbax.close()


def _small_leaves(sides: _Sides, num_leaves: int, rounds: int) -> Iterator[_Sample]:
    """Saves and loads leaves of 1 kB."""
    make = jax.jit(lambda number: jnp.full(256, number, jnp.float32))
    state = {f"leaf_{number:05d}": make(number) for number in range(num_leaves)}
    for _ in range(rounds + 1):
        for side in _SIDES:
            gc.collect()
            began = time.perf_counter()
            wait = sides.begin(side, state)
            yield f"small_block_{side}", time.perf_counter() - began
            wait()
            yield f"small_{side}", time.perf_counter() - began
            began = time.perf_counter()
            sides.load(side, state)
            yield f"small_load_{side}", time.perf_counter() - began


def _huge_leaf(sides: _Sides, num_mib: int, rounds: int) -> Iterator[_Sample]:
    """Saves one leaf and takes a step after it, which donates the leaf or does not."""
    leaf = jax.jit(lambda: jnp.zeros((num_mib, 2**18), jnp.float32))()
    programs = {
        "donated": jax.jit(lambda state: state + 1, donate_argnums=0),
        "kept": jax.jit(lambda state: state + 1),
    }
    for name, step in programs.items():
        # A view is held at a first save, and of the next two one may be copied.
        for turn in range(rounds + 3):
            for side in ("none", *_SIDES):
                gc.collect()
                for _ in range(2):
                    leaf = jax.block_until_ready(step(leaf))
                resident = process_memory.resident_bytes("VmRSS")
                process_memory.reset_peak()
                began = time.perf_counter()
                wait = sides.begin(side, {"w": leaf})
                blocked = time.perf_counter() - began
                leaf = jax.block_until_ready(step(leaf))
                stepped = time.perf_counter() - began
                wait()
                if turn >= 2:
                    yield f"huge_block_{name}_{side}", blocked
                    yield f"huge_{name}_{side}", stepped
                    peak = process_memory.resident_bytes("VmHWM") - resident
                    yield f"huge_bytes_{name}_{side}", peak


def measure(directory: str, *, leaves: int, mib: int, rounds: int) -> dict[str, Any]:
    """Runs this module in a new process, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, directory, *map(str, (leaves, mib, rounds))],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def figures(platform: str, samples: Samples) -> dict[str, report.Figure]:
    """The figures of both sides; `platform` is that of the devices."""
    ours, orbax = samples["small_ours"], samples["small_orbax"]
    by_name = {
        "small_backup_ratio_orbax": report.ratio(
            orbax,
            ours,
            "at least 3; 20,000 leaves of 1 kB in storage, over Orbax's speed",
        ),
        "small_backup_secs": report.figure("secs", "until they are in storage", ours),
        "small_backup_orbax_secs": report.figure("secs", "Orbax", orbax),
        "small_save_block_ratio_orbax": report.ratio(
            samples["small_block_ours"],
            samples["small_block_orbax"],
            "below 1; over Orbax's",
        ),
        "small_ram_restore_ratio_orbax": report.ratio(
            samples["small_load_orbax"],
            samples["small_load_ours"],
            "over the speed of Orbax",
        ),
    }
    for name in ("donated", "kept"):
        what = f"a leaf of 1 GiB on {platform}, {name} by the next step"
        block, block_orbax = [samples[f"huge_block_{name}_{side}"] for side in _SIDES]
        step, step_orbax = [samples[f"huge_{name}_{side}"] for side in _SIDES]
        by_name |= {
            f"huge_block_ratio_orbax_{name}": report.ratio(
                block, block_orbax, f"over Orbax's; {what}"
            ),
            f"huge_block_and_step_ratio_orbax_{name}": report.ratio(
                step,
                step_orbax,
                "below 1; blocked until the next step is done, over Orbax's",
            ),
        }
        for side in _SIDES:
            by_name[f"huge_block_and_step_ms_{name}_{side}"] = report.figure(
                "ms", side, [1000 * each for each in samples[f"huge_{name}_{side}"]]
            )
            by_name[f"huge_memory_mib_{name}_{side}"] = report.figure(
                "MiB",
                "at most one state and 768 MiB" if side == "ours" else side,
                [each / 2**20 for each in samples[f"huge_bytes_{name}_{side}"]],
            )
        by_name[f"huge_step_ms_{name}"] = report.figure(
            "ms", "no save", [1000 * each for each in samples[f"huge_{name}_none"]]
        )
    return by_name


def main() -> None:
    """Measures, and prints the samples after the first of each side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("num_leaves", type=int)
    parser.add_argument("huge_mib", type=int)
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    samples: Samples = {}
    for name, work in [
        ("small", lambda sides: _small_leaves(sides, given.num_leaves, given.rounds)),
        ("huge", lambda sides: _huge_leaf(sides, given.huge_mib, given.rounds)),
    ]:
        sides = _Sides(f"{given.directory}/{name}")
        for side, sample in work(sides):
            samples.setdefault(side, []).append(sample)
        sides.close()
    counted = {side: values[1:] for side, values in samples.items()}
    print(json.dumps({"platform": jax.default_backend(), "samples": counted}))


if __name__ == "__main__":
    main()
