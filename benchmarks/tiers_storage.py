"""Storage alone, beside Orbax in the same run: until durable, blocked, and memory.

One process saves three kinds of state to a directory on the RAM disk: few large leaves,
many small ones, and both. The sides take turns. Prints all samples as JSON.
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
import numpy as np
from orbax.checkpoint import v1 as ocp

from benchmarks import report, tiers_alone
from elastic_ckpt.checkpoint import factory
from elastic_ckpt.tiers import choices

KINDS = ("few", "many", "mixed")
_SIDES = ("ours", "orbax")
# A leaf of `few`, and one of `many`.
_LARGE_MIB = 64
_SMALL_ITEMS = 256


def measure(directory: str, *, leaves: int, mib: int, rounds: int) -> dict[str, Any]:
    """Runs this module in a process of its own for each kind of state.

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
        where = [f"{directory}/{kind}", kind]
        done = subprocess.run(
            [sys.executable, "-m", __name__, *where, *map(str, (leaves, mib, rounds))],
            stdout=subprocess.PIPE,
            check=True,
        )
        samples[kind] = json.loads(done.stdout)
    return {"samples": samples}


def figures(samples: dict[str, Any]) -> dict[str, report.Figure]:
    """The figures of all kinds of state."""
    found = {}
    for kind, of_kind in samples.items():
        found |= {
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
        for side in _SIDES:
            found[f"storage_durable_secs_{kind}_{side}"] = report.figure(
                "secs", side, of_kind[f"durable_{side}"]
            )
            found[f"storage_memory_mib_{kind}_{side}"] = report.figure(
                "MiB", side, [each / 2**20 for each in of_kind[f"bytes_{side}"]]
            )
            found[f"storage_block_ms_{kind}_{side}"] = report.figure(
                "ms", side, [1000 * each for each in of_kind[f"block_{side}"]]
            )
    return found


def _states(kind: str, num_small: int, mib: int) -> Callable[[float], dict[str, Any]]:
    # A state of results of programs, anew for each number.
    num_large = max(1, mib // _LARGE_MIB)
    large = jax.jit(lambda x: jnp.full((mib // num_large, 2**18), x, jnp.float32))
    small = jax.jit(lambda x: jnp.full(_SMALL_ITEMS, x, jnp.float32))

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
    directory: str, make: Callable[[float], dict[str, Any]], rounds: int
) -> Iterator[tuple[str, float]]:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    stored = choices.Persistent(f"{directory}/ours", every=1, keep=keep)
    sides: dict[str, Any] = {
        "ours": factory.Checkpointer([stored]),
        "orbax": ocp.training.Checkpointer(
            f"{directory}/orbax", preservation_policy=keep
        ),
    }
    steps = itertools.count(1)
    for _ in range(rounds + 1):
        for side, checkpointer in sides.items():
            step = next(steps)
            state = make(float(step))
            gc.collect()
            resident = tiers_alone.resident_bytes("VmRSS")
            tiers_alone.reset_peak()
            began = time.perf_counter()
            response = checkpointer.save_async(step, state, force=True)
            blocked = time.perf_counter() - began
            assert response.result()
            yield f"durable_{side}", time.perf_counter() - began
            yield f"block_{side}", blocked
            yield f"bytes_{side}", tiers_alone.resident_bytes("VmHWM") - resident
        views = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        began = time.perf_counter()
        copies = [view.copy() for view in views]
        yield "copy", time.perf_counter() - began
        del copies, views, state
    for checkpointer in sides.values():
        checkpointer.close()


def main() -> None:
    """Measures one kind of state, and prints the samples after the first of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("num_small", type=int)
    parser.add_argument("mib", type=int)
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    make = _states(given.kind, given.num_small, given.mib)
    samples: dict[str, list[float]] = {}
    for name, sample in _samples(given.directory, make, given.rounds):
        samples.setdefault(name, []).append(sample)
    print(json.dumps({name: found[1:] for name, found in samples.items()}))


if __name__ == "__main__":
    main()
