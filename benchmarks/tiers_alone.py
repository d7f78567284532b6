"""Sides of suite `tiers` in one process, on whatever devices JAX finds here.

`ours` has storage alone and uploads what it captured, `staged` has a RAM disk before
it, and `orbax` storage. All directories are on the RAM disk.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from benchmarks import report, turns
from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

# A large leaf, and the elements of a small one.
_LARGE_MIB = 64
_SMALL_ITEMS = 256

_State = dict[str, jax.Array]


def figures(
    directory: str, *, leaves: int, mib: int, rounds: int
) -> dict[str, report.Figure]:
    """Measures in a new process; `mib` is of all large leaves, or of the only one."""
    samples = turns.in_new_process(_measure, directory, leaves, mib, rounds)
    few = "until in storage, storage alone"
    by_name = {
        "small_backup_ratio_orbax": report.ratio(
            samples["small_orbax"],
            samples["small_staged"],
            f"at least 3; {leaves:,} leaves of 1 kB in storage, over Orbax's speed",
        ),
        "storage_durable_ratio_orbax_few": report.ratio(
            samples["few_ours"],
            samples["few_orbax"],
            f"at most 1.1; {few}, over Orbax's",
        ),
        "storage_durable_ratio_staged_few": report.ratio(
            samples["few_ours"],
            samples["few_staged"],
            "until in storage, over writing to a RAM disk and uploading from there",
        ),
        "storage_durable_secs_few_ours": report.figure(
            "secs", few, samples["few_ours"]
        ),
    }
    for name in ("donated", "kept"):
        what = f"a leaf of {mib} MiB, {name} by the next step"
        by_name |= {
            f"huge_block_ratio_orbax_{name}": report.ratio(
                samples[f"block_{name}_staged"],
                samples[f"block_{name}_orbax"],
                f"over Orbax's; {what}",
            ),
            f"huge_block_and_step_ratio_orbax_{name}": report.ratio(
                samples[f"step_{name}_staged"],
                samples[f"step_{name}_orbax"],
                "below 1; blocked until the next step is done, over Orbax's",
            ),
        }
    return by_name


class _Sides:
    # The checkpointers; each step that is saved replaces the one before.

    def __init__(self, directory: str) -> None:
        keep = cast(Any, ocp.training.preservation_policies.LatestN(1))

        def stored(name: str) -> choices.Persistent:
            return choices.Persistent(f"{directory}/{name}", every=1, keep=keep)

        self._made: dict[str, Any] = {
            "ours": frontend.Checkpointer([stored("ours")]),
            "staged": frontend.Checkpointer(
                [choices.Local(f"{directory}/ram"), stored("staged")], run="staged"
            ),
            "orbax": ocp.training.Checkpointer(
                f"{directory}/orbax", preservation_policy=keep
            ),
        }
        self._steps = itertools.count(1)

    def begin(self, side: str, state: _State) -> Callable[[], Any]:
        """Begins a save; what it returns waits until the step is in storage."""
        response = self._made[side].save_checkpointables_async(
            next(self._steps), {"state": state}, force=True
        )
        return response.result if side == "orbax" else response.durable

    def close(self) -> None:
        for each in self._made.values():
            each.close()


def _measure(directory: str, leaves: int, mib: int, rounds: int) -> turns.Secs:
    samples: turns.Secs = {}
    parts = {
        "small": lambda sides: _durable("small", sides, _small(leaves), rounds),
        "few": lambda sides: _durable("few", sides, _few(mib), rounds),
        "huge": lambda sides: _huge(sides, mib, rounds),
    }
    for name, part in parts.items():
        sides = _Sides(f"{directory}/{name}")
        for measured, secs in part(sides):
            samples.setdefault(measured, []).append(secs)
        sides.close()
    # The first ones start threads and compile.
    return {name: secs[1:] for name, secs in samples.items()}


def _small(num_leaves: int) -> Callable[[float], _State]:
    make = jax.jit(lambda number: jnp.full(_SMALL_ITEMS, number, jnp.float32))
    return lambda number: {
        f"leaf_{each:05d}": make(number + each) for each in range(num_leaves)
    }


def _few(mib: int) -> Callable[[float], _State]:
    # Values that cannot be compressed.
    count = max(1, mib // _LARGE_MIB)
    shape = (mib // count, 2**18)

    @jax.jit
    def make(number: float) -> jax.Array:
        items = jnp.arange(shape[0] * shape[1], dtype=jnp.float32)
        return jnp.sin(items * number).reshape(shape)

    return lambda number: {f"large_{n:03d}": make(number + n) for n in range(count)}


def _durable(
    name: str, sides: _Sides, make: Callable[[float], _State], rounds: int
) -> Iterator[tuple[str, float]]:
    # Until a state is in storage.
    for number in range(rounds + 1):
        for side in ("ours", "orbax", "staged"):
            state = jax.block_until_ready(make(number + 0.5))
            gc.collect()
            began = time.perf_counter()
            assert sides.begin(side, state)()
            yield f"{name}_{side}", time.perf_counter() - began
            # Its memory is free for the next state.
            del state


def _huge(sides: _Sides, mib: int, rounds: int) -> Iterator[tuple[str, float]]:
    # Saves one leaf and takes a step after it, which donates the leaf or does not.
    leaf = jax.jit(lambda: jnp.zeros((mib, 2**18), jnp.float32))()
    programs = {
        "donated": jax.jit(lambda state: state + 1, donate_argnums=0),
        "kept": jax.jit(lambda state: state + 1),
    }
    for name, step in programs.items():
        # A view is held at a first save, and of the next two one may be copied.
        for number in range(rounds + 3):
            for side in ("staged", "orbax"):
                gc.collect()
                for _ in range(2):
                    leaf = jax.block_until_ready(step(leaf))
                began = time.perf_counter()
                wait = sides.begin(side, {"w": leaf})
                blocked = time.perf_counter() - began
                leaf = jax.block_until_ready(step(leaf))
                stepped = time.perf_counter() - began
                wait()
                if number >= 2:
                    yield f"block_{name}_{side}", blocked
                    yield f"step_{name}_{side}", stepped
