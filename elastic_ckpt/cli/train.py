"""`elastic-ckpt train CONFIG key=value...`: trains, or continues, one run.

The program of a host is `run_host`. It is the same in a single process, in a world that
the local supervisor starts, and under an outer launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from elastic_ckpt.cli import (
    journal,
    listeners,
    overrides,
    progress,
    run_directory,
    training_files,
)
from elastic_ckpt.config import keys, load, schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import termination

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from elastic_ckpt.checkpoint import run_saver
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import member
    from elastic_ckpt.training import evaluation, step_log, train_step

# What a host imports, for the fork server to have it ready.
_HOST_MODULES = (
    "elastic_ckpt_sidecar.remote_iterator",
    "elastic_ckpt.checkpoint.factory",
    "elastic_ckpt.data.pipeline",
    "elastic_ckpt.elastic.multicontroller",
    "elastic_ckpt.training.loop",
)

_EXAMPLES = """\
Examples:

  elastic-ckpt train configs/demo_cpu.yml
  elastic-ckpt train configs/demo_cpu.yml hosts=2 steps=80    # continue on two hosts
  elastic-ckpt config configs/demo_cpu.yml hosts=2            # what would run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    overrides.add_arguments(parser, example="configs/demo_cpu.yml")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{_EXAMPLES}\nKeys and their defaults:\n\n{keys.listing()}"


def run(arguments: argparse.Namespace) -> int:
    """Prepares the data, finds or starts the world, and trains.

    Returns:
      0 when the run has trained all of its steps, 143 if SIGTERM ended it before.
    """
    config = load.load(arguments.config, arguments.overrides)
    if not config.run.run_name:
        raise errors.ConfigError(
            "run_name is empty; set it, for example run_name=first"
        )
    listeners.check(config.metrics)
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    with progress.Progress(config.run.log_period) as shown:
        is_stopped = _start(config, shown)
    return termination.EXIT_CODE if is_stopped else 0


def _start(config: schema.Config, shown: progress.Progress) -> bool:
    if config.world.enable_single_controller:
        from elastic_ckpt.elastic import single_controller

        single_controller.initialize()
        return _run_here(training_files.prepare(config), shown)
    from elastic_ckpt.elastic import supervisor

    # At once, though an outer launcher may yet be found: importing takes seconds.
    if config.world.hosts > 1:
        supervisor.warm_up(_HOST_MODULES)
    from elastic_ckpt.elastic import multicontroller

    multicontroller.configure(config.world)
    if multicontroller.join_outer_launcher():
        return _run_here(training_files.prepare(config), shown)
    check_world(config)
    config = training_files.prepare(config)
    run = _run_here if config.world.hosts == 1 else _run_supervised
    is_stopped = run(config, shown)
    print(f"check it: elastic-ckpt audit {run_directory.of(config)}")
    return is_stopped


def check_world(config: schema.Config) -> None:
    """Raises a ConfigError if the local launcher cannot start the configured world."""
    from elastic_ckpt.core import topology
    from elastic_ckpt.data import batch_size

    world = config.world
    if world.hardware != "cpu":
        if world.hosts > 1:
            raise errors.ConfigError(
                f"hosts={world.hosts} with hardware={world.hardware}: the local"
                " launcher starts CPU hosts; start one process a host with Slurm or a"
                " JobSet, or set hosts=1"
            )
        return
    expected = topology.Topology(
        hosts=world.hosts,
        slices=world.slices,
        devices=world.hosts * world.devices_per_host,
    )
    expected.check()
    batch_size.schedule(config.data, expected)


def _run_here(config: schema.Config, shown: progress.Progress) -> bool:
    from elastic_ckpt.core import topology

    if not topology.is_primary():
        shown.close()
        return run_host(config, events.nobody)
    with journal.kept(config, shown) as emit:
        return run_host(config, emit)


def run_host(config: schema.Config, emit: events.Emit) -> bool:
    """Trains on this host, a member of a world that all of its hosts have joined.

    Returns:
      Whether the run was asked to end before its last step.
    """
    from elastic_ckpt.core import topology

    with listeners.started(config):
        return _train(config, emit if topology.is_primary() else events.nobody)


def _train(config: schema.Config, emit: events.Emit) -> bool:
    from elastic_ckpt.core import topology
    from elastic_ckpt.data import batch_size, pipeline
    from elastic_ckpt.training import loop, train_step

    began_secs = time.monotonic()
    mesh, world = topology.make_mesh(config.world.slices)
    vocab_size = _vocab_size(config)
    data = pipeline.from_config(config.data, vocab_size=vocab_size)
    sizes = batch_size.schedule(config.data, world)
    batches = _batches(config, data, mesh=mesh, global_batch_size=sizes.at(0))
    program = train_step.build(config, mesh, vocab_size=vocab_size)
    saver = _saver(config, batches, emit)
    start_step = _start_step(config, saver.latest_step if saver else None)
    if sizes.at(start_step) != sizes.at(0):
        batches.resize(sizes.at(start_step))
    emit(
        "run_started",
        run=config.run.run_name,
        **dataclasses.asdict(world),
        start_step=start_step,
        steps=config.run.steps,
    )
    if saver and start_step:
        state = saver.restore(program.abstract_state)
        train_step.check_step(state, start_step)
    else:
        state = program.init()
    log = _step_log(config, world, start_step)
    evaluation = _evaluation(config, program, mesh, emit)
    with _stopping(config, start_step, emit) as is_stopping:
        ended = loop.Loop(
            program=program,
            batches=batches,
            sizes=sizes,
            log=log,
            saver=saver,
            evaluation=evaluation,
            emit=emit,
            meet=_meeting(),
            is_stopping=is_stopping,
        ).run(state, start_step=start_step, steps=config.run.steps)
        # Only here: after an error the other hosts may be gone, and closing waits for
        # them.
        parts = [saver, log, evaluation.batches if evaluation else None, batches]
        for part in filter(None, parts):
            part.close()
    if ended.is_stopped:
        emit("run_stopped", step=ended.step, saved=saver is not None)
    else:
        emit("run_finished", step=ended.step, secs=time.monotonic() - began_secs)
    return ended.is_stopped


def _meeting() -> Callable[[], object]:
    from elastic_ckpt.checkpoint import allgather

    # If a host dies meanwhile, the coordination service ends the others.
    return functools.partial(
        allgather.of_this_world().gather, "compiled", None, timeout_secs=24 * 3600
    )


@contextlib.contextmanager
def _stopping(
    config: schema.Config, start_step: int, emit: events.Emit
) -> Iterator[Callable[[int], bool]]:
    grace_secs = _grace_secs(config)

    def expire() -> None:
        assert isinstance(emit, journal.Journal)
        emit.stopped_without_a_save()
        os._exit(termination.EXIT_CODE)

    with termination.agreed(
        start_step=start_step,
        grace_secs=grace_secs,
        requested=lambda: emit("stop_requested", within_secs=grace_secs),
        expired=expire,
    ) as is_stopping:
        yield is_stopping


def _start_step(config: schema.Config, latest_step: int | None) -> int:
    start_step = latest_step or 0
    if start_step > config.run.steps:
        raise errors.ConfigError(
            f"{run_directory.of(config)} is at step {start_step}, and"
            f" steps={config.run.steps}: steps counts over all starts of a run; set it"
            f" above {start_step} to continue, or choose another run_name"
        )
    return start_step


def _step_log(
    config: schema.Config, world: topology.Topology, start_step: int
) -> step_log.StepLog | None:
    from elastic_ckpt.core import topology
    from elastic_ckpt.training import step_log

    if not topology.is_primary():
        return None
    directory = run_directory.of(config)
    run_directory.write_config(directory, config)
    return step_log.StepLog(
        directory,
        start_step=start_step,
        world=world,
        data=dataclasses.asdict(config.data),
    )


def _saver(
    config: schema.Config, batches: Any, emit: events.Emit
) -> run_saver.RunSaver | None:
    from elastic_ckpt.checkpoint import configured_tiers, run_saver
    from elastic_ckpt.core import topology
    from elastic_ckpt.frontend.checkpointer import Checkpointer

    section = config.checkpoint
    if not section.enable_checkpointing:
        return None
    directory = os.path.join(run_directory.of(config), run_saver.DIRECTORY)
    checkpointer = Checkpointer(
        configured_tiers.tiers(config, persistent=directory),
        mesh=topology.make_mesh(config.world.slices)[0],
        run=config.run.run_name,
        slice_name=topology.slice_of_this_host(config.world.slices),
        emit=emit,
    )
    return run_saver.RunSaver(checkpointer, section, data=batches)


def _evaluation(
    config: schema.Config, program: train_step.Program, mesh: Mesh, emit: events.Emit
) -> evaluation.Evaluation | None:
    from elastic_ckpt.core import topology
    from elastic_ckpt.data import batch_size, pipeline
    from elastic_ckpt.training import evaluation

    if not config.data.eval_interval:
        return None
    _, world = topology.make_mesh(config.world.slices)
    rows = batch_size.global_batch_size(config.data, world)
    data = pipeline.eval_from_config(
        config.data, global_batch_size=rows, vocab_size=_vocab_size(config)
    )
    return evaluation.Evaluation(
        evaluate=program.evaluate,
        batches=_batches(config, data, mesh=mesh, global_batch_size=rows),
        interval=config.data.eval_interval,
        max_batches=config.data.eval_steps,
        emit=emit,
    )


def _vocab_size(config: schema.Config) -> int:
    from elastic_ckpt.data import pipeline

    return config.model.vocab_size or pipeline.vocab_size(config.data)


def _batches(config: schema.Config, data: Any, **placement: Any) -> Any:
    from elastic_ckpt.frontend.batches import configured_batches

    return configured_batches(data, config.data, **placement)


def _run_supervised(config: schema.Config, shown: progress.Progress) -> bool:
    with journal.kept(config, shown) as emit:
        supervise(config, _join_and_run, emit)
        return emit.is_stopped


def supervise(
    config: schema.Config,
    program: Callable[[schema.Config, member.Member, events.Emit], None],
    emit: events.Emit,
) -> None:
    """Runs `program` on each host of the world that `config` describes."""
    from elastic_ckpt.elastic import supervisor

    logs = os.path.join(run_directory.of(config), run_directory.LOGS)
    supervisor.World(
        functools.partial(program, config),
        num_hosts=config.world.hosts,
        # A directory of its own: this may be a second start of a run that is alive.
        log_directory=storage.make_unique_directory(logs),
        emit=emit,
        grace_secs=_grace_secs(config),
    ).run()


def _join_and_run(
    config: schema.Config, place: member.Member, emit: events.Emit
) -> None:
    from elastic_ckpt.data import token_blocks
    from elastic_ckpt.elastic import multicontroller

    # All of them are on this machine; its cores are shared.
    os.environ[token_blocks.LOCAL_HOSTS_VARIABLE] = str(place.num_hosts)
    multicontroller.configure(config.world)
    own = listeners.on_one_machine(config.metrics, place.host)
    with multicontroller.joined(place):
        run_host(dataclasses.replace(config, metrics=own), emit)


def _grace_secs(config: schema.Config) -> float:
    # The rest of the time is for the report.
    return 0.9 * config.deploy.termination_grace_period_seconds


def _end_on_sigterm(number: int, frame: types.FrameType | None) -> None:
    del number, frame
    os.write(2, b"elastic-ckpt train: ended by SIGTERM before the first step\n")
    raise SystemExit(termination.EXIT_CODE)
