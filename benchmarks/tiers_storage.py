"""Storage alone, beside Orbax in the same run: until durable, blocked, and memory.

One process saves three kinds of state to a directory on the RAM disk: few large leaves,
many small ones, and both; the values cannot be compressed. The sides take turns. Our
checkpointer uploads the captured memory; `staged` first writes the chunks to a private
directory on the RAM disk and uploads them from there, which a local tier does. The
memory of each side is measured in a separate process, since memory that one side has
freed may be used by the other. Prints all samples as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from benchmarks import process_memory, report
from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

KINDS = ("few", "many", "mixed")
_SIDES = ("ours", "orbax")
_TIMED_SIDES = (*_SIDES, "staged")
# A leaf of `few`, and one of `many`.
_LARGE_MIB = 64
_SMALL_ITEMS = 256


def measure(directory: str, *, leaves: int, mib: int, rounds: int) -> dict[str, Any]:
    """Runs this module in a new process for each kind of state.

    Args:
      directory: for both sides.
      leaves: small ones.
      mib: of all large ones.
      rounds: that are counted.

    Returns:
      The `samples`, by kind, measure and side.
    """
    samples: dict[str, Any] = {}
    for kind in KINDS:
        samples[kind] = {}
        for side in ("both", *_SIDES):
            arguments = [f"{directory}/{kind}-{side}", kind, side]
            size = map(str, (leaves, mib, rounds))
            done = subprocess.run(
                [sys.executable, "-m", __name__, *arguments, *size],
                stdout=subprocess.PIPE,
                check=True,
            )
            shutil.rmtree(arguments[0])
            measured = json.loads(done.stdout)
            is_timed = side == "both"
            samples[kind] |= {
                name: values
                for name, values in measured.items()
                if name.startswith("bytes_") != is_timed
            }
    return {"samples": samples}


def figures(samples: dict[str, Any]) -> dict[str, report.Figure]:
    """The figures of all kinds of state."""
    by_name = {}
    for kind, of_kind in samples.items():
        by_name |= {
            f"storage_durable_ratio_orbax_{kind}": report.ratio(
                of_kind["durable_ours"],
                of_kind["durable_orbax"],
                "at most 1.1; until in storage, storage alone, over Orbax's",
            ),
            f"storage_memory_ratio_orbax_{kind}": report.ratio(
                of_kind["bytes_ours"],
                of_kind["bytes_orbax"],
                "at most 1.1; the most that a save adds to the process, over Orbax's",
            ),
            f"storage_block_ratio_copy_{kind}": report.ratio(
                of_kind["block_ours"],
                of_kind["copy"],
                "at most 1; over a copy of the state to fresh memory",
            ),
        }
        by_name[f"storage_durable_ratio_staged_{kind}"] = report.ratio(
            of_kind["durable_ours"],
            of_kind["durable_staged"],
            "until in storage, over writing to a RAM disk and uploading from there",
        )
        for side in _TIMED_SIDES:
            by_name[f"storage_durable_secs_{kind}_{side}"] = report.figure(
                "secs", side, of_kind[f"durable_{side}"]
            )
        for side in _SIDES:
            by_name[f"storage_memory_mib_{kind}_{side}"] = report.figure(
                "MiB", side, [each / 2**20 for each in of_kind[f"bytes_{side}"]]
            )
            by_name[f"storage_block_ms_{kind}_{side}"] = report.figure(
                "ms", side, [1000 * each for each in of_kind[f"block_{side}"]]
            )
    return by_name


def _states(kind: str, num_small: int, mib: int) -> Callable[[float], dict[str, Any]]:
    # A state of results of programs, anew for each number.
    num_large = max(1, mib // _LARGE_MIB)

    def values(number: jax.Array, *shape: int) -> jax.Array:
        items = jnp.arange(math.prod(shape), dtype=jnp.float32)
        return jnp.sin(items * number).reshape(shape)

    large = jax.jit(lambda number: values(number, mib // num_large, 2**18))
    small = jax.jit(lambda number: values(number, _SMALL_ITEMS))

    def make(number: float) -> dict[str, Any]:
        state = {}
        if kind != "many":
            state |= {f"large_{n:03d}": large(number + n) for n in range(num_large)}
        if kind != "few":
            count = num_small if kind == "many" else num_small // 4
            state |= {f"small_{n:05d}": small(number + n) for n in range(count)}
        return jax.block_until_ready(state)

    return make


def _samples(
    directory: str,
    make: Callable[[float], dict[str, Any]],
    rounds: int,
    only: str,
) -> Iterator[tuple[str, float]]:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    stored = choices.Persistent(f"{directory}/ours", every=1, keep=keep)
    sides: dict[str, Any] = {}
    if only != "orbax":
        sides["ours"] = frontend.Checkpointer([stored])
    if only != "ours":
        sides["orbax"] = ocp.training.Checkpointer(
            f"{directory}/orbax", preservation_policy=keep
        )
    if only == "both":
        staged = choices.Persistent(f"{directory}/staged", every=1, keep=keep)
        sides["staged"] = frontend.Checkpointer(
            [choices.Local(f"{directory}/ram"), staged], run="staged"
        )
    steps = itertools.count(1)
    state = make(0.5)
    resident = process_memory.resident_bytes("VmRSS")
    for _ in range(rounds + 1):
        for side, checkpointer in sides.items():
            step = next(steps)
            # The memory of the state before is free for this one.
            del state
            state = make(step + 0.5)
            gc.collect()
            process_memory.reset_peak()
            began = time.perf_counter()
            response = checkpointer.save_async(step, state, force=True)
            blocked = time.perf_counter() - began
            # With a local tier the result is there before the step is in storage.
            assert response.durable() if side == "staged" else response.result()
            yield f"durable_{side}", time.perf_counter() - began
            yield f"block_{side}", blocked
            yield f"bytes_{side}", process_memory.resident_bytes("VmHWM") - resident
        views = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        began = time.perf_counter()
        copies = [view.copy() for view in views]
        yield "copy", time.perf_counter() - began
        del copies, views
    for checkpointer in sides.values():
        checkpointer.close()


def main() -> None:
    """Measures one kind of state, and prints the samples after the first of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("side", choices=("both", *_SIDES))
    parser.add_argument("num_small", type=int)
    parser.add_argument("mib", type=int)
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    make = _states(given.kind, given.num_small, given.mib)
    samples: dict[str, list[float]] = {}
    measured = _samples(given.directory, make, given.rounds, given.side)
    for name, sample in measured:
        samples.setdefault(name, []).append(sample)
    print(json.dumps({name: values[1:] for name, values in samples.items()}))


if __name__ == "__main__":
    main()
