"""The program of a host: assembles and runs the job of a run in this host's world.

It is the same in a single process, in a world that the local launcher starts, and
under an outer launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable

from elastic_ckpt.application import journal, listeners
from elastic_ckpt.application.assemble import assemble
from elastic_ckpt.config import schema
from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import termination


def run(config: schema.Config, emit: events.Emit) -> bool:
    """Trains on this host, a member of a world that all of its hosts have joined.

    Args:
      config: of the run; the files of its data exist.
      emit: called for each event of the run; on the primary host alone.

    Returns:
      Whether the run was asked to end before its last step.
    """
    began_secs = time.monotonic()
    emit = emit if topology.is_primary() else events.nobody
    with listeners.started(config):
        job = assemble(config, topology.present(config.world.slices), emit=emit)
        emit(
            "run_started",
            run=config.run.run_name,
            **dataclasses.asdict(job.world),
            start_step=job.start_step,
            steps=config.run.steps,
        )
        state = job.restore_or_init()
        with _stopping(config, int(state["step"]), emit) as is_stopping:
            ended = job.run(state, is_stopping=is_stopping)
            job.close()
        if ended.is_stopped:
            emit("run_stopped", step=ended.step, saved=job.checkpointer is not None)
        else:
            secs = time.monotonic() - began_secs
            emit("run_finished", step=ended.step, secs=secs)
    return ended.is_stopped


def _stopping(
    config: schema.Config, start_step: int, emit: events.Emit
) -> contextlib.AbstractContextManager[Callable[[int], bool]]:
    grace_secs = termination.grace_secs(config.deploy)

    def expire() -> None:
        assert isinstance(emit, journal.Journal)
        emit.stopped_without_a_save()
        os._exit(termination.EXIT_CODE)

    return termination.agreed(
        start_step=start_step,
        grace_secs=grace_secs,
        requested=lambda: emit("stop_requested", within_secs=grace_secs),
        expired=expire,
    )
