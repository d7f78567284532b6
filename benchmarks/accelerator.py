"""Suite `accelerator`: a loop on a GPU or TPU, with its data and its saves.

A step consists of bfloat16 matrix products that take about 50 ms and depend on the
batch, which is copied to the device. The loop waits for each step, like a loop that
prints losses. The sides take turns; one side is the step without data, with a batch
that stays on the device.

* `step_slowdown_percent`: by how much data slows a step down, including every cost to
  the loop: packed rows of 2048 tokens from Parquet with the defaults of `from_config`,
  in global batches of 64; `..._worker` with `grain_worker_count=1`. `..._slow` is for
  rows that take Python 0.7 of a step to create, with `ec.data.sharded` and
  `num_workers=1`.
* `save_block_ms`: how long `save_async` of a 4 GiB state to RAM blocks the loop.
  `save_secs` is the time until the state is committed, `load_secs` the time until it is
  back on the device; their ratios are relative to `jax.device_get` and `jax.device_put`
  of the same arrays. `_first` marks the first save and load of the process.
* `save_slowdown_percent`: by how much saves slow down steps that donate the state, with
  one save every forty steps.
* `tensor_ratio_read`: the time for the digests with which `ec.components.validate`
  compares replicas, of all leaves on all devices, relative to a read of the same leaves
  by the same devices.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import elastic_ckpt as ec
from benchmarks import data, report, sidecar, turns
from benchmarks.peers.documents import Documents
from elastic_ckpt.checkpoint.components import device_digests
from elastic_ckpt.core import errors

_STEP_SECS = 0.05
_WIDTH = 8192
_ROWS = 64
_ROUNDS = 7
_STEPS_A_ROUND = 20
_STEPS_UNCOUNTED = 4
_LEAVES = 16
_LEAF_MIB = 256

_Step = Callable[[dict[str, jax.Array]], jax.Array]
_State = dict[str, jax.Array]


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    if jax.default_backend() == "cpu":
        raise errors.ConfigError("suite accelerator needs a GPU or a TPU")
    report.runs_on(jax.devices())
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    step = _step()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        figures = _slowdowns(mesh, step, pathlib.Path(directory))
    return figures | _saves(mesh, step) | _replicas(mesh)


def _step() -> _Step:
    key = jax.random.key(0)
    weights = jax.random.normal(key, (_WIDTH, _WIDTH), jnp.bfloat16) / _WIDTH**0.5

    @jax.jit
    def products(number: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        start = weights + batch["inputs"].sum().astype(jnp.bfloat16)
        made = jax.lax.fori_loop(0, number, lambda _, each: each @ weights, start)
        return made.astype(jnp.float32).mean()

    batch = {"inputs": jnp.zeros((_ROWS, 8), jnp.int32)}
    secs = {}
    for number in (50, 50, 150):
        began = time.perf_counter()
        products(jnp.int32(number), batch).block_until_ready()
        secs[number] = time.perf_counter() - began
    of_one = (secs[150] - secs[50]) / 100
    number = jnp.int32(round(_STEP_SECS / of_one))
    return lambda batch: products(number, {"inputs": batch["inputs"]})


def _slowdowns(
    mesh: Mesh, step: _Step, directory: pathlib.Path
) -> dict[str, report.Figure]:
    documents = Documents(directory=directory)
    documents.write()

    def packed(**more: Any) -> Any:
        files = ",".join(documents.files)
        more |= {"grain_train_files": files, "grain_shuffle_buffer_size": 100}
        made = data.configured(**more)
        return ec.batches(made, mesh=mesh, global_batch_size=data.NUM_SHARDS)

    sides = {
        "": packed(),
        "_worker": packed(grain_worker_count=1),
        "_slow": sidecar.in_process(mesh, sidecar.SLOW, num_workers=1),
    }
    resident = {name: next(batches) for name, batches in sides.items()}
    slower: turns.Secs = {name: [] for name in sides}
    alone: list[float] = []
    for name in sidecar.in_turns(sides):
        repeated = (dict(resident[name]) for _ in itertools.count())
        without = sidecar.steps(repeated, step, _STEPS_A_ROUND)[1]
        sidecar.steps(sides[name], step, _STEPS_UNCOUNTED)
        secs = sidecar.steps(sides[name], step, _STEPS_A_ROUND)[1]
        slower[name].append(100 * (secs / without - 1))
        alone.append(1000 * without)
    sidecar.close(sides)
    return {"step_ms": report.figure("ms", "without data", alone[len(sides) :])} | {
        f"step_slowdown_percent{name}": report.figure(
            "%", "at most 5" if not name else "for comparison", samples[1:]
        )
        for name, samples in slower.items()
    }


def _replicas(mesh: Mesh) -> dict[str, report.Figure]:
    leaves = list(_new_state(mesh, 0).values())

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"), check_vma=False
    )
    def read(leaves: list[jax.Array]) -> jax.Array:
        bits = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in leaves]
        return jnp.stack([each.sum(dtype=jnp.uint32) for each in bits])[None]

    secs = turns.timed(
        {
            "digest": lambda: device_digests.look(
                dict(enumerate(leaves)), is_sample=False
            ),
            "read": lambda: np.asarray(read(leaves)),
        },
        _ROUNDS,
    )
    against = "at most 1.5; relative to a jitted sum of the same leaves' bits"
    return {"tensor_ratio_read": report.ratio(secs["digest"], secs["read"], against)}


def _saves(mesh: Mesh, step: _Step) -> dict[str, report.Figure]:
    secs: dict[str, list[float]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        secs[name].append(time.perf_counter() - began)

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as ram,
        ec.Checkpointer([ec.Local(ram, every=1)], mesh=mesh) as checkpointer,
    ):

        def save(number: int, state: _State) -> ec.SaveResponse:
            saved = {"state": state}
            with timed("block"):
                response = checkpointer.save_checkpointables_async(number, saved)
            assert response is not None
            return response

        for number in range(0, 2 * (_ROUNDS + 1), 2):
            state = _new_state(mesh, number)
            expected = jax.device_get(_new_state(mesh, number))
            with timed("save"):
                save(number, state).result()
            blank = {"state": _new_state(mesh, 0)}
            with timed("load"):
                loaded = checkpointer.load_checkpointables(number, blank)
                jax.block_until_ready(loaded)
            _check(loaded["state"], expected)
            # Arrays that have not been fetched before: JAX caches fetched values.
            again = _new_state(mesh, number)
            with timed("get"):
                copied = jax.device_get(again)
            with timed("put"):
                jax.block_until_ready(
                    jax.device_put(copied, jax.NamedSharding(mesh, jax.P()))
                )
            state = _forty(step, state)
            with timed("steps"):
                state = _forty(step, state)
            expected = jax.device_get(jax.tree.map(jnp.copy, state))
            with timed("steps and a save"):
                response = save(number + 1, state)
                state = _forty(step, state)
            response.result()
            # The steps have donated the arrays being saved.
            loaded = checkpointer.load_checkpointables(number + 1, blank)
            _check(loaded["state"], expected)
    gib = f"{_LEAVES * _LEAF_MIB / 1024:g} GiB"
    warm = {name: samples[1:] for name, samples in secs.items()}
    # Each round saves twice.
    warm["block"] = secs["block"][2:]
    ratios = zip(warm["steps and a save"], warm["steps"], strict=True)

    def blocked(what: str, samples: list[float]) -> report.Figure:
        return report.figure("ms", f"{gib} to RAM{what}", [1000 * n for n in samples])

    return {
        "save_block_ms": blocked("; at most 10", warm["block"]),
        "save_block_ms_first": blocked(", first in the process", secs["block"][:1]),
        "save_secs": report.figure("s", f"{gib} to RAM; at most 0.4", warm["save"]),
        "save_ratio": report.ratio(
            warm["save"], warm["get"], "jax.device_get of the same state"
        ),
        "load_secs": report.figure("s", f"{gib}, verified; at most 0.25", warm["load"]),
        "load_secs_first": report.figure(
            "s", f"{gib}, first in the process; at most 0.8", secs["load"][:1]
        ),
        "load_ratio": report.ratio(
            warm["load"], warm["put"], "jax.device_put of the same state"
        ),
        "save_slowdown_percent": report.figure(
            "%",
            f"a save of {gib} per forty steps that donate it; at most 2",
            [100 * (a / b - 1) for a, b in ratios],
        ),
    }


def _check(state: _State, expected: Mapping[str, np.ndarray]) -> None:
    for name, leaf in state.items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes()


@functools.partial(jax.jit, donate_argnums=0)
def _update(state: _State, by: jax.Array) -> _State:
    return {name: leaf + by for name, leaf in state.items()}


def _forty(step: _Step, state: _State) -> _State:
    batch = {"inputs": jnp.zeros((_ROWS, 8), jnp.int32)}
    for _ in range(40):
        state = _update(state, step(batch))
        jax.block_until_ready(state)
    return state


def _new_state(mesh: Mesh, seed: int) -> _State:
    shape = (_LEAF_MIB * 2**20 // 4 // 1024, 1024)
    replicated = jax.NamedSharding(mesh, jax.P())

    @functools.partial(jax.jit, out_shardings=replicated)
    def leaf(number: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(number), shape, jnp.float32)

    state = {f"w{n}": leaf(jnp.int32(100 * seed + n)) for n in range(_LEAVES)}
    return jax.block_until_ready(state)
