"""Assembles the job of a run, once for each world that the run has.

Nothing here outlives a job or is shared between two: a run that continues on other
hosts assembles another job, from the same configuration and another topology.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from elastic_ckpt.application import job, run_directory
from elastic_ckpt.checkpoint import configured_tiers, run_saver
from elastic_ckpt.checkpoint.run_world import ALONE
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic.world import World, of_run
from elastic_ckpt.frontend import Checkpointer, configured_batches
from elastic_ckpt.training import configured_callbacks, evaluation, train_step
from elastic_ckpt.training.callbacks import Callback


def assemble(
    config: schema.Config,
    world: topology.Topology,
    *,
    devices: Sequence[jax.Device] | None = None,
    place: World | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    emit: events.Emit = events.nobody,
) -> job.Job:
    """The job of a run on `world`; every host of it calls this.

    Args:
      config: of the run; the files of its data exist.
      world: the hosts, slices and devices to train on.
      devices: those of `world`; by default all that JAX has.
      place: of this host in an elastic run.
      callbacks: your own by name, the same on all hosts, besides the configured ones.
      emit: called for each event of the run.

    Raises:
      ConfigError: if parts, devices or the number of steps do not fit together.
      DataError: if the data cannot be read.
      RunError: if another run uses the RAM disk, or hosts cannot be reached.
    """
    if config.data.use_dpo:
        raise errors.ConfigError(
            "use_dpo=true: this trainer has no loss for preference pairs; read them by"
            " ec.data.from_config in a loop of your own"
        )
    called = configured_callbacks.of_run(config, callbacks or {}, emit=emit)
    mesh = topology.mesh_of(world, devices)
    sizes = batch_size.schedule(config.data, world)
    vocab_size = config.model.vocab_size or pipeline.vocab_size(config.data)
    data = pipeline.from_config(config.data, vocab_size=vocab_size)
    batches = configured_batches(
        data, config.data, mesh=mesh, global_batch_size=sizes.at(0)
    )
    parts = 1 if place is None else place.microbatches
    program = train_step.build(config, mesh, vocab_size=vocab_size, microbatches=parts)
    evaluated = _evaluation(config, world, program, mesh, vocab_size, emit)
    with contextlib.ExitStack() as on_error:
        saver = None
        if config.checkpoint.enable_checkpointing:
            checkpointer = _checkpointer(config, world, mesh, place, emit)
            on_error.enter_context(checkpointer)
            saver = run_saver.RunSaver(
                checkpointer, config.checkpoint, data=batches, callbacks=called or None
            )
        start_step = _start_step(config, saver)
        if sizes.at(start_step) != sizes.at(0):
            batches.resize(sizes.at(start_step))
        on_error.pop_all()
    return job.Job(
        config=config,
        world=world,
        mesh=mesh,
        program=program,
        batches=batches,
        sizes=sizes,
        checkpointer=saver,
        evaluation=evaluated,
        callbacks=called,
        start_step=start_step,
        emit=emit,
    )


def _checkpointer(
    config: schema.Config,
    world: topology.Topology,
    mesh: Mesh,
    place: World | None,
    emit: events.Emit,
) -> Checkpointer:
    directory = os.path.join(run_directory.path_of(config), run_saver.DIRECTORY)
    slice_name = topology.slice_of_this_host(world.slices)
    return Checkpointer(
        configured_tiers.tiers(config, persistent=directory),
        mesh=mesh,
        run=config.run.run_name,
        slice_name=slice_name if place is None else place.slice_name,
        world=ALONE if place is None else of_run(place),
        emit=emit,
    )


def _evaluation(
    config: schema.Config,
    world: topology.Topology,
    program: train_step.Program,
    mesh: Mesh,
    vocab_size: int,
    emit: events.Emit,
) -> evaluation.Evaluation | None:
    if not config.data.eval_interval:
        return None
    rows = batch_size.global_batch_size(config.data, world)
    data = pipeline.eval_from_config(
        config.data, global_batch_size=rows, vocab_size=vocab_size
    )
    return evaluation.Evaluation(
        evaluate=program.evaluate,
        batches=configured_batches(
            data, config.data, mesh=mesh, global_batch_size=rows
        ),
        interval=config.data.eval_interval,
        max_batches=config.data.eval_steps,
        emit=emit,
    )


def _start_step(config: schema.Config, saver: run_saver.RunSaver | None) -> int:
    start_step = (saver.latest_step if saver else None) or 0
    if start_step > config.run.steps:
        raise errors.ConfigError(
            f"steps={config.run.steps}, but {run_directory.path_of(config)} is already"
            f" at step {start_step}: steps counts over all starts of a run; set it"
            f" above {start_step} to continue, or choose another run_name"
        )
    return start_step
