"""Suite `follow`: the bytes that a run's follower moves and its cost to the trainer.

A trainer with one process saves each step to RAM: weights, half of which are frozen,
and the moments of the other half. A follower in a second process loads the weights of
each step from the agent. If there are two cores, the trainer and its agent use one and
the follower uses the other, as if it were on a different machine.

* `follow_bytes_over_changed`: the bytes that a follower receives from one step to the
  next, including lists, manifests and headers, relative to the bytes of the weights
  that changed. A relay counts them.
* `follow_slowdown_percent`: the median step time while the follower runs, relative to
  steps while it is paused. Both take turns of a few steps, a sample has many turns, and
  the order within a pair of turns alternates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import relay, report, sized
from elastic_ckpt.tiers.persistent import run_files

_NEVER = 10**9
_NUM_LEAVES = sized(8, 4)  # of the weights
_LEAF_BYTES = sized(4 << 20, 64 << 10)
_PRODUCTS = sized(12, 1)  # of matrices, in a step
_BYTE_STEPS = sized(9, 2)  # of which the bytes are counted
_SAMPLES = sized(9, 2)  # of the slowdown
_PAIRS = sized(8, 1)  # of turns with and without the follower, of each sample
_TURN_STEPS = sized(5, 3)  # the first is not counted


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    with (
        tempfile.TemporaryDirectory(prefix="follow-", dir="/dev/shm") as name,
        _started(_train, name) as (process, trainer),
    ):

        def turn(num_steps: int) -> list[float]:
            trainer.send(num_steps)
            return trainer.recv()

        turn(1)
        ratios = _bytes_over_changed(name, turn)
        slowdowns = _slowdowns(name, turn)
        # Terminates the trainer and with it the agent.
        trainer.send(0)
        process.join()
    return {
        "follow_bytes_over_changed": report.figure(
            "ratio", "the changed weights' bytes; at most 1.1", ratios
        ),
        "follow_slowdown_percent": report.figure(
            "percent", "steps while the follower is paused; at most 5", slowdowns
        ),
    }


@contextlib.contextmanager
def _started(program: Callable[..., None], directory: str) -> Iterator[tuple[Any, Any]]:
    # A fresh process and a pipe to it.
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=program, args=(its, pathlib.Path(directory)))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def _bytes_over_changed(
    directory: str, turn: Callable[[int], list[float]]
) -> list[float]:
    steps = f"{directory}/steps"
    agents = run_files.read_agents(steps)
    assert agents is not None
    ((machine, url),) = agents.urls.items()
    with relay.Relay(url) as between:
        counted = dataclasses.replace(
            agents, agents={machine: run_files.Seen(between.url, 0)}
        )
        run_files.write_agents(steps, counted)
        with _started(_follow, directory) as (_, loaded):
            # The follower begins with the existing step.
            loaded.recv()
            ratios = []
            for _ in range(_BYTE_STEPS):
                before = between.num_bytes
                turn(1)
                loaded.recv()
                num_bytes = between.num_bytes - before
                ratios.append(num_bytes / (_NUM_LEAVES // 2 * _LEAF_BYTES))
    run_files.write_agents(steps, agents)
    return ratios


def _slowdowns(directory: str, turn: Callable[[int], list[float]]) -> list[float]:
    percent = []
    with _started(_follow, directory) as (follower, loaded):
        loaded.recv()
        turn(_TURN_STEPS)
        for _ in range(_SAMPLES):
            secs: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(_PAIRS):
                for is_followed in (True, False) if pair % 2 else (False, True):
                    number = signal.SIGCONT if is_followed else signal.SIGSTOP
                    os.kill(follower.pid, number)
                    secs[is_followed] += turn(_TURN_STEPS)[1:]
            with_it, without = map(statistics.median, (secs[True], secs[False]))
            percent.append(100 * (with_it / without - 1))
    return percent


def _use_core(number: int) -> None:
    # Before JAX has threads; the agent inherits it.
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[number]})


def _train(turns: Any, directory: pathlib.Path) -> None:
    _use_core(0)
    import jax
    import jax.numpy as jnp

    import elastic_ckpt as ec

    half = _NUM_LEAVES // 2
    keys = jax.random.split(jax.random.key(0), 2 * half)

    def leaves(keys: Any) -> list[Any]:
        return [jax.random.normal(key, (_LEAF_BYTES // 4,)) for key in keys]

    # Half of the weights are frozen; the others have two moments each.
    state = {
        "params": {"frozen": leaves(keys[:half]), "trained": leaves(keys[half:])},
        "moments": leaves(keys),
    }

    @jax.jit
    def train(state: Any, product: Any) -> tuple[Any, Any]:
        for _ in range(_PRODUCTS):
            product = jnp.tanh(product @ product)
        change = 1 + product[0, 0] * 1e-3
        params = {
            "frozen": state["params"]["frozen"],
            "trained": [each * 0.999 + change for each in state["params"]["trained"]],
        }
        moments = [each * 0.9 + change for each in state["moments"]]
        return {"params": params, "moments": moments}, product

    product = jax.random.normal(jax.random.key(1), (1024, 1024))
    tiers = [
        ec.Local(directory / "ram"),
        ec.Peers(interface="127.0.0.1"),
        ec.Persistent(directory / "steps", every=_NEVER),
    ]
    step = 0
    with ec.Checkpointer(tiers) as checkpointer:
        while num_steps := turns.recv():
            secs = []
            for _ in range(num_steps):
                began_secs = time.perf_counter()
                step += 1
                state, product = train(state, product)
                jax.block_until_ready(state)
                checkpointer.save_checkpointables_async(step, {"state": state})
                secs.append(time.perf_counter() - began_secs)
            checkpointer.wait()
            turns.send(secs)


def _follow(loaded: Any, directory: pathlib.Path) -> None:
    _use_core(1)
    import jax

    import elastic_ckpt as ec

    secret = directory / "ram" / "secret"
    for step in ec.watch_steps(directory / "steps", secret_file=secret):
        jax.block_until_ready(step.load())
        loaded.send(step.step)
