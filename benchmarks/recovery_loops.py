"""The cost of the loop of a run, beside a bare one.

The hosts of an elastic run take turns with the same compiled step and the same batches:
a bare loop, and elastic_ckpt's loop.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

from benchmarks import turns
from elastic_ckpt.core import events
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import elastic_run, journal, load, schema, training_files

_RESULTS = "turns.json"


def measure(
    settings: dict[str, Any], directory: pathlib.Path, steps: int, rounds: int
) -> turns.Secs:
    """Runs the turns, of so many steps each.

    Returns:
      The seconds of a step in each turn, of the sides `bare` and `loop`; and, by `bare
      thread` and `loop thread`, the processor seconds of the loop's thread.
    """
    values = {
        "run_name": "loops",
        "base_output_directory": str(directory),
        "steps": 10**6,
        **settings,
        "enable_checkpointing": False,
        "elastic_compile_ahead_seconds": 0,
    }
    directory.mkdir()
    path = directory / "loops.yml"
    path.write_text(json.dumps(values))
    config = training_files.prepare(load.load(path), report=print)
    train = functools.partial(_train, steps, rounds)
    elastic_run.warm_up()
    with journal.kept(config, events.nobody) as kept:
        elastic_run.run_on_hosts(config, kept, train=train)
    return json.loads((directory / _RESULTS).read_text())


def _train(steps: int, rounds: int, config: schema.Config, world: World) -> None:
    import jax
    from jax.experimental import multihost_utils

    from elastic_ckpt.core import topology
    from elastic_ckpt.training import listeners
    from elastic_ckpt.training.job import assemble

    with listeners.started(config):
        job = assemble(config, world.topology, place=world, emit=world.emit)
        state = job.restore_or_init()
        compiled = world.compiled(job.loop.program.step, state, next(job.loop.batches))

        def bare(state: Any) -> Any:
            for _ in range(steps):
                state, _ = compiled(state, next(job.loop.batches))
            return state

        def loop(state: Any) -> Any:
            turn = dataclasses.replace(job, steps=int(state["step"]) + steps)
            return turn.run(
                state,
                compiled=lambda *_, **__: compiled,
                begin=world.begin,
                is_stopping=world.should_stop,
            ).state

        sides: dict[str, Callable[[Any], Any]] = {"bare": bare, "loop": loop}
        secs: turns.Secs = {}
        for name in [*sides] * (rounds + 1):
            multihost_utils.sync_global_devices(name)
            began, thread_began = time.perf_counter(), time.thread_time()
            state = jax.block_until_ready(sides[name](state))
            took = time.perf_counter() - began
            thread_took = time.thread_time() - thread_began
            secs.setdefault(name, []).append(took / steps)
            secs.setdefault(f"{name} thread", []).append(thread_took / steps)
        job.close()
    if topology.is_primary():
        counted = {name: samples[1:] for name, samples in secs.items()}
        path = pathlib.Path(config.run.base_output_directory, _RESULTS)
        path.write_text(json.dumps(counted))
