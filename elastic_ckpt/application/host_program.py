"""The program of a host: assembles and runs the job of a run in this host's world.

It is the same in a single process, in a world that the local launcher starts, and
under an outer launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from elastic_ckpt.application import configured, journal, listeners
from elastic_ckpt.application.job import Job, assemble
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, process, topology
from elastic_ckpt.elastic import termination, watch
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.training import loop
from elastic_ckpt.training.callbacks import Callback


def train(
    config: schema.Config,
    world: World,
    *,
    callbacks: Mapping[str, Callback] | None = None,
) -> bool:
    """Trains on this host, a member of a world that all of its hosts have joined.

    Args:
      config: of the run; the files of its data exist.
      world: of this host; its events are emitted on the primary host alone.
      callbacks: your own by name, besides the configured ones.

    Returns:
      Whether the hosts left before the last step.

    Raises:
      DivergedError: if a callback has ended the run.
    """
    began_secs = time.monotonic()
    emit = world.emit if topology.is_primary() else events.nobody
    # The journal of a process that trains in several worlds has its listeners.
    has_listeners = world.devices is not None
    listening = contextlib.nullcontext() if has_listeners else listeners.started(config)
    with listening:
        world.begin("prepare")
        job = assemble(
            config,
            world.topology,
            devices=world.devices,
            place=world,
            callbacks=callbacks,
            emit=emit,
        )
        emit(
            "run_started",
            run=config.run.run_name,
            **dataclasses.asdict(job.world),
            start_step=job.start_step,
            steps=config.run.steps,
        )
        try:
            ended = _run(job, world)
        except Exception as error:
            if world.devices is not None:
                # This process goes on.
                job.abandon()
            elif topology.num_hosts() == 1:
                job.abandon(alone=error)
            elif job.saver is not None:
                # This process ends at once, and what it wrote to is free.
                job.saver.let_others_write()
            raise
        if ended.is_stopped:
            emit("run_stopped", step=ended.step, saved=job.saver is not None)
        else:
            secs = time.monotonic() - began_secs
            emit("run_finished", step=ended.step, secs=secs)
    return ended.is_stopped


def compile_ahead(config: schema.Config, world: World) -> None:
    """Compiles the step of a world that may follow; reads one batch, writes nothing.

    Args:
      config: of the run; the files of its data exist.
      world: of this host, in a world of that size.
    """
    job = assemble(configured.only_compiled(config), world.topology, place=world)
    # Batches grow to their last size, and keep it.
    job.batches.begin_at(config.run.steps)
    job.batches.resize(job.sizes.at(config.run.steps))
    world.compiled(job.program.step, job.program.abstract_state, next(job.batches))
    job.close()


def _run(job: Job, world: World) -> loop.Ended:
    world.begin("restore")
    state = job.restore_or_init(handed_over=world.take_state)
    ended = job.run(
        state,
        compiled=world.compiled,
        begin=world.begin,
        is_stopping=world.should_stop,
        is_ending=world.should_stop_early,
        is_left=world.will_resume,
    )
    world.begin(watch.CLOSE)
    world.put_state(ended.step, ended.state)
    job.close()
    newest = job.saver.latest_step if job.saver else None
    if ended.finding is not None:
        kept = "saved" if newest == ended.step else "not saved"
        left = (
            f"; the newest step is {newest}" if newest not in (None, ended.step) else ""
        )
        raise errors.DivergedError(
            f"the run was ended after step {ended.step}, which is {kept}:"
            f" {ended.finding.why}{left}"
        )
    return ended


@contextlib.contextmanager
def alone(config: schema.Config, emit: events.Emit) -> Iterator[World]:
    """The world of this process, if no supervisor has started it.

    SIGTERM ends the run while the block runs: before the first step at once.
    """

    def ended() -> None:
        assert isinstance(emit, journal.Journal)
        emit.stopped_without_a_save()

    with termination.in_this_process(
        grace_secs=configured.grace_secs(config), ended=ended, emit=emit
    ) as is_ending:
        slices = config.world.slices
        # An outer launcher starts the hosts again, which take over.
        claimant = claims.new_claimant(
            process.this() if topology.num_hosts() == 1 else None
        )
        yield World(
            number=1,
            slices=tuple(range(slices)),
            slice_name=topology.slice_of_this_host(slices),
            emit=emit,
            should_stop=is_ending,
            _between=BetweenWorlds(claimant=claimant),
        )
