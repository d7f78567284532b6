"""Sides of suite `tiers` in one process, on any devices that JAX finds here.

`ours` has only storage and uploads the captured state, `staged` has a RAM disk in front
of storage, and `orbax` has only storage. All directories are on the RAM disk.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from benchmarks import report, sized, turns
from elastic_ckpt import frontend
from elastic_ckpt.tiers import choices

_ROUNDS = sized(3, 1)
_SMALL_LEAVES = sized(20_000, 20)
_SMALL_ITEMS = 256
# The size of all large leaves, or of the only one; and the size of each of several.
_MIB = sized(1024, 2)
_LARGE_MIB = min(64, _MIB)

_State = dict[str, jax.Array]


def measure(directory: str) -> dict[str, report.Figure]:
    """Measures in new processes."""
    samples = turns.in_new_process(_measured, directory)
    beside = turns.in_new_process(_beside, f"{directory}/beside")
    few = "until in storage, without a RAM tier"
    figures = {
        "small_backup_ratio_orbax": report.ratio(
            samples["small_orbax"],
            samples["small_staged"],
            f"at least 3; {_SMALL_LEAVES:,} leaves of 1 kB in storage, Orbax's time"
            " speed",
        ),
        "storage_durable_ratio_orbax_few": report.ratio(
            samples["few_ours"],
            samples["few_orbax"],
            f"at most 1.1; {few}, relative to Orbax",
        ),
        "storage_durable_ratio_staged_few": report.ratio(
            samples["few_ours"],
            samples["few_staged"],
            "until in storage, relative to writing to a RAM disk and uploading from it",
        ),
        "storage_durable_secs_few_ours": report.figure(
            "secs", few, samples["few_ours"]
        ),
    }
    for name in ("donated", "kept"):
        figures[f"huge_block_ratio_orbax_{name}"] = report.ratio(
            samples[f"block_{name}_staged"],
            samples[f"block_{name}_orbax"],
            f"relative to Orbax; a leaf of {_MIB} MiB, {name} by the next step",
        )
        figures[f"huge_block_and_step_ratio_orbax_{name}"] = report.ratio(
            samples[f"step_{name}_staged"],
            samples[f"step_{name}_orbax"],
            "below 1; blocked until the next step is done, relative to Orbax",
        )
    for name, mib in beside.items():
        figures[f"restore_beside_mib_{name}"] = report.figure(
            "MiB", f"at most 512; resident beside a state of {_MIB} MiB on a CPU", mib
        )
    return figures


@contextlib.contextmanager
def _sides(directory: str) -> Iterator[dict[str, Callable[[_State], Any]]]:
    # Each side begins a save and returns a function that waits until the step is in
    # storage. Each saved step replaces the previous one.
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))

    def stored(name: str) -> choices.Persistent:
        return choices.Persistent(f"{directory}/{name}", every=1, keep=keep)

    ram = choices.Local(f"{directory}/ram")
    made: dict[str, Any] = {
        "ours": frontend.Checkpointer([stored("ours")]),
        "orbax": ocp.training.Checkpointer(
            f"{directory}/orbax", preservation_policy=keep
        ),
        "staged": frontend.Checkpointer([ram, stored("staged")], run="staged"),
    }
    steps = itertools.count(1)

    def begin(side: str, state: _State) -> Callable[[], Any]:
        response = made[side].save_checkpointables_async(
            next(steps), {"state": state}, force=True
        )
        return response.result if side == "orbax" else response.durable

    yield {side: functools.partial(begin, side) for side in made}
    for each in made.values():
        each.close()


def _measured(directory: str) -> turns.Secs:
    samples: turns.Secs = collections.defaultdict(list)
    for name, make in (("small", _small()), ("few", _few())):
        with _sides(f"{directory}/{name}") as sides:
            for number in range(_ROUNDS + 1):
                for side, begin in sides.items():
                    state = jax.block_until_ready(make(number + 0.5))
                    gc.collect()
                    began = time.perf_counter()
                    assert begin(state)()
                    took = time.perf_counter() - began
                    samples[f"{name}_{side}"].append(took)
                    # Frees the memory for the next state.
                    del state
    with _sides(f"{directory}/huge") as sides:
        _add_huge(samples, sides)
    # The first rounds start threads and compile.
    return {name: secs[1:] for name, secs in samples.items()}


def _beside(directory: str) -> dict[str, list[float]]:
    # By tier and sharding, the MiB resident beside a restored state that was saved in
    # rows. Half of the state is one leaf.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((4,), ("x",))
    shapes = {"huge": (_MIB // 2, 2**18)}
    shapes |= {
        f"large_{n}": (_LARGE_MIB // 2, 2**18) for n in range(_MIB // _LARGE_MIB)
    }
    specs = {"rows": P("x"), "columns": P(None, "x"), "everywhere": P()}

    def asked(spec: P) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = NamedSharding(mesh, spec)
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for name, shape in shapes.items()
        }

    tiers: dict[str, list[Any]] = {
        "ram": [choices.Local(f"{directory}/ram")],
        "storage": [choices.Persistent(f"{directory}/storage", every=1)],
    }
    beside: dict[str, list[float]] = collections.defaultdict(list)
    for tier, chosen in tiers.items():
        with frontend.Checkpointer(chosen, run="beside") as checkpointer:
            rows = NamedSharding(mesh, specs["rows"])
            state = {
                name: jax.device_put(np.ones(shape, np.float32), rows)
                for name, shape in shapes.items()
            }
            assert checkpointer.save(1, state)
            checkpointer.wait()
            del state
            load = functools.partial(checkpointer.load, 1)
            for name in list(specs) * _ROUNDS:
                restored = functools.partial(_ready, load, asked(specs[name]))
                copies = 4 if name == "everywhere" else 1
                mib = 1024 * turns.growth_gib(restored) - copies * _MIB
                beside[f"{tier}_{name}"].append(mib)
    return beside


def _ready(load: Callable[[Any], Any], asked: Any) -> Any:
    return jax.block_until_ready(load(asked))


def _small() -> Callable[[float], _State]:
    make = jax.jit(lambda number: jnp.full(_SMALL_ITEMS, number, jnp.float32))
    return lambda number: {
        f"leaf_{each:05d}": make(number + each) for each in range(_SMALL_LEAVES)
    }


def _few() -> Callable[[float], _State]:
    # Values that cannot be compressed.
    @jax.jit
    def make(number: float) -> jax.Array:
        items = jnp.arange(_LARGE_MIB * 2**18, dtype=jnp.float32)
        return jnp.sin(items * number).reshape(_LARGE_MIB, 2**18)

    return lambda number: {
        f"large_{n:03d}": make(number + n) for n in range(_MIB // _LARGE_MIB)
    }


def _add_huge(samples: turns.Secs, sides: dict[str, Callable[[_State], Any]]) -> None:
    # Saves one leaf and then takes a step, which donates the leaf or does not.
    leaf = jax.jit(lambda: jnp.zeros((_MIB, 2**18), jnp.float32))()
    programs = {
        "donated": jax.jit(lambda state: state + 1, donate_argnums=0),
        "kept": jax.jit(lambda state: state + 1),
    }
    for name, step in programs.items():
        # The first save holds a view; one of the next two saves may copy.
        for number in range(_ROUNDS + 3):
            for side in ("staged", "orbax"):
                gc.collect()
                for _ in range(2):
                    leaf = jax.block_until_ready(step(leaf))
                began = time.perf_counter()
                wait = sides[side]({"w": leaf})
                blocked = time.perf_counter() - began
                leaf = jax.block_until_ready(step(leaf))
                stepped = time.perf_counter() - began
                wait()
                if number >= 2:
                    samples[f"block_{name}_{side}"].append(blocked)
                    samples[f"step_{name}_{side}"].append(stepped)
