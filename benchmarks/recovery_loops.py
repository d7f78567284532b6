"""The costs of the loop of a run, beside a bare one, and of its saves.

The hosts of an elastic run take turns with the same compiled step and the same batches:
a bare loop, elastic_ckpt's loop, and that loop with a save to RAM every so many steps.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from elastic_ckpt.core import events
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import elastic_run, journal, load, schema, training_files

if TYPE_CHECKING:
    from elastic_ckpt.checkpoint.run_saver import RunSaver
    from elastic_ckpt.training.job import Job

BARE = "bare"
LOOP = "loop"
_RESULTS = "turns.json"


def thread_of(name: str) -> str:
    """The name of the processor seconds of a turn."""
    return f"{name} thread"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of the hosts.

    Attributes:
      steps: of each turn.
      rounds: that are counted; one before them is not.
      periods: the steps between two saves to RAM, in a turn of each.
    """

    steps: int
    rounds: int
    periods: tuple[int, ...] = ()


def measure(
    settings: dict[str, Any], directory: pathlib.Path, turns: Turns
) -> dict[str, list[float]]:
    """Runs the turns.

    Args:
      settings: keys and values of the run's configuration.
      directory: for its files, which is made.
      turns: of the hosts.

    Returns:
      The seconds of a step in each turn, by `BARE`, `LOOP` or the period; and, by
      `thread_of` these, the processor seconds of the loop's thread.
    """
    values = {
        "run_name": "loops",
        "base_output_directory": str(directory),
        "steps": 10**6,
        **settings,
        "local_checkpoint_period": 1,
        "elastic_compile_ahead_seconds": 0,
        "save_checkpoint_on_completion": False,
    }
    directory.mkdir()
    path = directory / "loops.yml"
    path.write_text(json.dumps(values))
    config = training_files.prepare(load.load(path), report=print)
    elastic_run.warm_up()
    with journal.kept(config, events.nobody) as kept:
        elastic_run.run_on_hosts(config, kept, train=functools.partial(_train, turns))
    return json.loads((directory / _RESULTS).read_text())


def _train(turns: Turns, config: schema.Config, world: World) -> None:
    from elastic_ckpt.checkpoint import run_saver
    from elastic_ckpt.core import topology
    from elastic_ckpt.training import configured, listeners
    from elastic_ckpt.training.job import assemble

    directory = config.run.base_output_directory
    without = dataclasses.replace(config.checkpoint, enable_checkpointing=False)
    chosen = configured.tiers(
        configured.in_memory_of(config, world.ram_directory),
        persistent=f"{directory}/steps",
    )
    with listeners.started(config):
        job = assemble(
            dataclasses.replace(config, checkpoint=without),
            world.topology,
            place=world,
            emit=world.emit,
        )
        with world.checkpointer(chosen, run=config.run.run_name) as checkpointer:
            saver = run_saver.RunSaver(
                checkpointer,
                configured.saved(config.checkpoint),
                data=cast(Any, job.loop.batches),
            )
            secs = _taken(turns, world, job, saver, checkpointer.wait)
        job.close()
    if topology.is_primary():
        pathlib.Path(directory, _RESULTS).write_text(json.dumps(secs))


def _taken(
    turns: Turns, world: World, job: Job, saver: RunSaver, wait: Callable[[], None]
) -> dict[str, list[float]]:
    import jax
    from jax.experimental import multihost_utils

    state = job.restore_or_init()
    compiled = world.compiled(job.loop.program.step, state, next(job.loop.batches))

    def bare(state: Any) -> Any:
        for _ in range(turns.steps):
            state, _ = compiled(state, next(job.loop.batches))
        return state

    def looped(state: Any, period: int | None) -> Any:
        steps = int(state["step"]) + turns.steps
        every = None if period is None else cast(Any, _Every(saver, period))
        inner = dataclasses.replace(job.loop, saver=every)
        turn = dataclasses.replace(job, steps=steps, loop=inner)
        return turn.run(
            state,
            compiled=lambda *_, **__: compiled,
            begin=world.begin,
            is_stopping=world.should_stop,
        ).state

    sides = {BARE: bare, LOOP: functools.partial(looped, period=None)}
    for period in turns.periods:
        sides[str(period)] = functools.partial(looped, period=period)
    names = [*sides, *map(thread_of, sides)]
    secs: dict[str, list[float]] = {name: [] for name in names}
    for number in range(turns.rounds + 1):
        for name, side in sides.items():
            multihost_utils.sync_global_devices(name)
            began, thread_began = time.perf_counter(), time.thread_time()
            state = jax.block_until_ready(side(state))
            took = time.perf_counter() - began
            thread_took = time.thread_time() - thread_began
            wait()
            if number:
                secs[name].append(took / turns.steps)
                secs[thread_of(name)].append(thread_took / turns.steps)
    return secs


class _Every:
    """Saves every so many steps."""

    def __init__(self, saver: RunSaver, period: int) -> None:
        self._saver = saver
        self._period = period

    def claim_world(self) -> int:
        """Claims the world, once for all turns."""
        return self._saver.claim_world()

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to save `step`."""
        del last
        # In the middle of a turn, which the writing of the save is to slow down.
        return step % self._period == self._period // 2

    def save(self, step: int, state: Any, *, last: bool) -> None:
        """Starts to save."""
        del last
        self._saver.save(step, state, last=False)

    def preserve_newest(self, up_to: int) -> int | None:
        """Preserves the newest saved step up to one."""
        return self._saver.preserve_newest(up_to)
