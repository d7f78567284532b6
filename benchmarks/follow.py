"""Suite `follow`: what a follower of a run moves, and what the trainer pays for it.

A trainer of one process saves each step to RAM: weights, half of which are frozen, and
the moments of the other half. A follower in another process loads the weights of each
step from the agent. The trainer and its agent have one core and the follower another
one, if there are two, as it would be on another machine.

* `follow_bytes_over_changed`: the bytes that a follower receives from one step to the
  next, lists, manifests and headers included, over those of the weights that changed. A
  relay counts them.
* `follow_slowdown_percent`: the median step beside the follower, over that while it
  stands still. They take turns of a few steps, a sample is of many turns, and which of
  two turns is first alternates.
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
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import relay, report
from elastic_ckpt.tiers.persistent import run_agents

_NEVER = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    num_leaves: int = 8  # of the weights
    leaf_kib: int = 4096
    products: int = 12  # matrix products in a step
    byte_steps: int = 9  # of which the bytes are counted
    samples: int = 9  # of the slowdown
    pairs: int = 8  # of turns with and without the follower, of each sample
    turn_steps: int = 5  # the first one is not counted


# Shows that the suite runs, and measures nothing.
SMALL = Size(
    num_leaves=4,
    leaf_kib=64,
    products=1,
    byte_steps=2,
    samples=2,
    pairs=1,
    turn_steps=3,
)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    with (
        tempfile.TemporaryDirectory(prefix="follow-", dir="/dev/shm") as name,
        _started(_train, pathlib.Path(name), size) as (_, trainer),
    ):

        def turn(num_steps: int) -> list[float]:
            trainer.send(num_steps)
            return trainer.recv()

        directory = pathlib.Path(name)
        turn(1)
        figures = _bytes_over_changed(directory, turn, size)
        figures |= _beside(directory, turn, size)
        # It ends, and with it the agent.
        trainer.send(0)
    return figures


@contextlib.contextmanager
def _started(
    program: Callable[..., None], *arguments: Any
) -> Iterator[tuple[int, Connection[Any, Any]]]:
    # A process that has done nothing else, its id, and a pipe to it.
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=program, args=(its, *arguments))
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, ours
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()


@contextlib.contextmanager
def _following(directory: pathlib.Path) -> Iterator[tuple[int, Connection[Any, Any]]]:
    with _started(_follow, directory) as (pid, loaded):
        # It begins with the step that is there.
        loaded.recv()
        yield pid, loaded
        os.kill(pid, signal.SIGKILL)


def _bytes_over_changed(
    directory: pathlib.Path, turn: Callable[[int], list[float]], size: Size
) -> dict[str, report.Figure]:
    agents = run_agents.read(directory / "steps")
    assert agents is not None
    ((machine, url),) = agents.urls.items()
    changed_bytes = size.num_leaves // 2 * size.leaf_kib * 2**10
    with relay.Relay(url) as between:
        counted = dataclasses.replace(agents, urls={machine: between.url})
        run_agents.write(directory / "steps", counted)
        with _following(directory) as (_, loaded):
            ratios = []
            for _ in range(size.byte_steps):
                before = between.num_bytes
                turn(1)
                loaded.recv()
                ratios.append((between.num_bytes - before) / changed_bytes)
    run_agents.write(directory / "steps", agents)
    return {
        "follow_bytes_over_changed": report.figure(
            "ratio", "the bytes of the weights that changed; at most 1.1", ratios
        )
    }


def _beside(
    directory: pathlib.Path, turn: Callable[[int], list[float]], size: Size
) -> dict[str, report.Figure]:
    slowdowns = []
    with _following(directory) as (pid, _):
        turn(size.turn_steps)
        for _ in range(size.samples):
            secs: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(size.pairs):
                for is_followed in (True, False) if pair % 2 else (False, True):
                    os.kill(pid, signal.SIGCONT if is_followed else signal.SIGSTOP)
                    secs[is_followed] += turn(size.turn_steps)[1:]
            with_it, without = map(statistics.median, (secs[True], secs[False]))
            slowdowns.append(100 * (with_it / without - 1))
    return {
        "follow_slowdown_percent": report.figure(
            "percent", "steps while the follower stands still; at most 5", slowdowns
        ),
    }


def _use_core(number: int) -> None:
    # Before JAX has threads; the agent inherits it.
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[number]})


def _train(turns: Connection[Any, Any], directory: pathlib.Path, size: Size) -> None:
    _use_core(0)
    import jax
    import jax.numpy as jnp

    import elastic_ckpt as ec

    half = size.num_leaves // 2
    keys = jax.random.split(jax.random.key(0), 2 * half)

    def leaves(keys: Any) -> list[Any]:
        return [jax.random.normal(key, (size.leaf_kib * 2**10 // 4,)) for key in keys]

    # Half of the weights are frozen; the others have two moments each.
    state = {
        "params": {"frozen": leaves(keys[:half]), "trained": leaves(keys[half:])},
        "moments": leaves(keys),
    }

    @jax.jit
    def train(state: Any, product: Any) -> tuple[Any, Any]:
        for _ in range(size.products):
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


def _follow(loaded: Connection[Any, Any], directory: pathlib.Path) -> None:
    _use_core(1)
    import jax

    import elastic_ckpt as ec

    secret = directory / "ram" / "secret"
    for step in ec.watch_steps(directory / "steps", secret_file=secret):
        jax.block_until_ready(step.load())
        loaded.send(step.step)
