"""A job that saves with stock Orbax, as a peer in suite `recovery`.

The job has the same step and batches as the run that it is compared with. When a
process dies, the launcher kills the others and restarts all of them: it reacts to the
death immediately, the machine is available immediately, and JAX's compilation cache is
warm.

* `plain`: Orbax's checkpointer, to a directory on the disk.
* `emergency`: Orbax's emergency `CheckpointManager`, to a RAM disk for each process,
  with a replica of the state in each.
"""

from __future__ import annotations

import math
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, NamedTuple

from benchmarks import recovery_bare
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.training import load

_SAVED_STEP = 3
_PATIENCE_SECS = 600.0


def restart_secs(
    manager: str, config: pathlib.Path, directory: pathlib.Path, *, hosts: int
) -> float:
    """The time from the death of a process to the first step afterwards.

    NaN if the job does not restart; its processes print the error.
    """
    directory.mkdir(parents=True)
    with _started(manager, config, directory, hosts) as (job, steps):
        if math.isnan(_next_step_time(job, steps)):
            return math.nan
        began = time.time()
        job[1].kill()
        job[1].join()
    with _started(manager, config, directory, hosts) as (job, steps):
        return _next_step_time(job, steps) - began


@contextmanager
def _started(
    manager: str, config: pathlib.Path, directory: pathlib.Path, hosts: int
) -> Iterator[tuple[list[Any], Any]]:
    # The processes, which are killed at the end, and a pipe for step times.
    context = multiprocessing.get_context("spawn")
    steps, done = context.Pipe(duplex=False)
    port = recovery_bare.ReservedPort()
    members = [
        host_process.Member(address=port.address, num_hosts=hosts, host=host)
        for host in range(hosts)
    ]
    job = [
        context.Process(target=_train, args=(manager, config, directory, each, done))
        for each in members
    ]
    try:
        for process in job:
            process.start()
        yield job, steps
    finally:
        for process in job:
            process.kill()
        for process in job:
            process.join()
        port.close()


def _next_step_time(job: list[Any], steps: Any) -> float:
    # The time of the step after the saved one; NaN if a process exits before.
    ends = [process.sentinel for process in job]
    while connection.wait([steps, *ends], _PATIENCE_SECS) == [steps]:
        step, at = steps.recv()
        if step > _SAVED_STEP:
            return at
    return math.nan


class _Manager(NamedTuple):
    # Returns the newest step or None; loads it; saves a step and waits.
    newest: int | None
    load: Callable[[], Any]
    save: Callable[[int, Any], object]


def _plain(directory: pathlib.Path, mesh: Any, abstract: Any, host: int) -> _Manager:
    from orbax.checkpoint import v1 as ocp

    del mesh, host
    checkpointer = ocp.training.Checkpointer(str(directory / "steps"))
    wanted = {"state": abstract}
    return _Manager(
        newest=checkpointer.latest and checkpointer.latest.step,
        load=lambda: checkpointer.load_checkpointables(None, wanted)["state"],
        save=lambda step, state: checkpointer.save_checkpointables(
            step, {"state": state}, force=True
        ),
    )


def _emergency(
    directory: pathlib.Path, mesh: Any, abstract: Any, host: int
) -> _Manager:
    import orbax.checkpoint as ocp

    from benchmarks import tiers_managers

    tiers_managers.initialize()
    manager = tiers_managers.emergency_manager(
        str(directory / f"ram-{host}"),
        str(directory / "persistent"),
        mesh,
        abstract,
        every=_SAVED_STEP,
    )
    side = tiers_managers.side_of(manager, ocp.args.Composite, abstract)
    newest: Any = manager.latest_step()
    return _Manager(
        newest=newest,
        load=lambda: side.load(newest),
        save=lambda step, state: side.save(step, state)(),
    )


def _train(
    name: str,
    config_path: pathlib.Path,
    directory: pathlib.Path,
    place: host_process.Member,
    done: Any,
) -> None:
    # One process of the job, until it is killed.
    config = load.load(config_path, [f"hosts={place.num_hosts}"])
    host_process.configure(config.world)
    with host_process.joined(place):
        import jax

        from elastic_ckpt import frontend
        from elastic_ckpt.core import topology
        from elastic_ckpt.data.lm import pipeline
        from elastic_ckpt.training import batch_size, model

        world = topology.present(place.num_hosts)
        mesh = topology.mesh_of(world)
        vocab_size = pipeline.vocab_size(config.data)
        batches = frontend.batches(
            pipeline.from_config(config.data, vocab_size=vocab_size),
            mesh=mesh,
            global_batch_size=batch_size.at(batch_size.schedule(config.data, world), 0),
            read_ahead=config.data.data_read_ahead_batches,
        )
        program = model.build(config, mesh)
        make = {"plain": _plain, "emergency": _emergency}[name]
        manager = make(directory, mesh, program.abstract_state, place.host)
        state = program.init() if manager.newest is None else manager.load()
        while True:
            state, report = program.step(state, next(batches))
            jax.block_until_ready(report)
            step = int(state["step"])
            if manager.newest is None and step == _SAVED_STEP:
                manager.save(step, state)
            if place.host == 0:
                done.send((step, time.time()))
