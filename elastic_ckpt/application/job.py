"""A job: the parts of a run in one world, over one mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from absl import logging
from jax.sharding import Mesh

from elastic_ckpt.application import run_directory
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.components import validation_schedule
from elastic_ckpt.config import schema
from elastic_ckpt.core import allgather, events, topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.elastic import executables
from elastic_ckpt.training import evaluation, loop, step_log, train_step

# If a host dies meanwhile, the coordination service ends the others.
_COMPILE_TIMEOUT_SECS = 24 * 3600

# Returns the state after a number of steps, in the form of an abstract one, or None.
HandedOver = Callable[[int, Any], Any]


class Batches(loop.Batches, Protocol):
    """The global batches of a run, open until they are closed."""

    def close(self) -> None:
        """Ends the threads and workers that read ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run in one world: `restore_or_init`, then `run`, then `close`.

    Every host of the world has one, and calls its methods in the same order.

    Attributes:
      config: of the run.
      world: the topology that the job was assembled for.
      mesh: over the devices of the world; all parts share it.
      program: compiled for the mesh.
      batches: global batches, of the size of the first step.
      sizes: the batch size of each step.
      checkpointer: None trains without checkpoints.
      evaluation: None trains without evaluating.
      start_step: steps that are done already; 0 for a new run.
      emit: called for each event of the run.
    """

    config: schema.Config
    world: topology.Topology
    mesh: Mesh
    program: train_step.Program
    batches: Batches
    sizes: batch_size.Schedule
    checkpointer: run_saver.RunSaver | None
    evaluation: evaluation.Evaluation | None
    start_step: int
    emit: events.Emit

    def restore_or_init(
        self, *, handed_over: HandedOver = lambda *_: None
    ) -> train_step.TrainState:
        """The state after `start_step` steps, sharded over the mesh.

        If that step proves to be unreadable, the state is that of the step before it.

        Args:
          handed_over: the state after a number of steps, if it is on the devices.

        Raises:
          CheckpointError: if the newest step is of another model, or none can be read.
          DataError: if its data state is of another pipeline.
        """
        if not (self.checkpointer and self.start_step):
            return self.program.init()
        state = handed_over(self.start_step, self.program.abstract_state)
        if state is not None and self.checkpointer.restore_data(self.start_step):
            return state
        state = self.checkpointer.restore(self.program.abstract_state)
        restored_step = self.checkpointer.latest_step
        assert restored_step is not None
        train_step.check_step(state, restored_step)
        if self.sizes.at(restored_step) != self.sizes.at(self.start_step):
            self.batches.resize(self.sizes.at(restored_step))
        return state

    def run(
        self,
        state: train_step.TrainState,
        *,
        compiled: loop.Compile | None = None,
        begin: Callable[[str], None] = lambda _: None,
        is_stopping: Callable[[int], bool] = lambda _: False,
    ) -> loop.Ended:
        """Trains from `state` to the last step, or until asked to stop.

        Args:
          state: from `restore_or_init`; its buffers are donated.
          compiled: compiles the step; by default anew in each world.
          begin: called with the name of each phase that begins.
          is_stopping: called after each step; whether to save and end there, the same
            on all hosts.
        """
        start_step = int(state["step"])
        number = self.checkpointer.claim_world() if self.checkpointer else 0
        log = self._open_log(start_step, number)
        trained = loop.Loop(
            program=self.program,
            batches=self.batches,
            sizes=self.sizes,
            log=log,
            saver=self.checkpointer,
            evaluation=self.evaluation,
            validation=validation_schedule.configured(
                self.config.validation, self.emit
            ),
            emit=self.emit,
            compiled=compiled
            or executables.Executables(kept=None, emit=self.emit).compiled,
            begin=begin,
            barrier=functools.partial(
                allgather.of_this_world().gather,
                "compiled",
                None,
                timeout_secs=_COMPILE_TIMEOUT_SECS,
            ),
            is_stopping=is_stopping,
        )
        with contextlib.closing(log) if log else contextlib.nullcontext():
            return trained.run(
                state, start_step=start_step, steps=self.config.run.steps
            )

    def close(self) -> None:
        """Waits for all saves, and ends the parts of the job.

        Only after a `run` that returned: after an error the other hosts may be gone,
        and closing waits for them.
        """
        if self.checkpointer:
            self.checkpointer.close()
        if self.evaluation:
            self.evaluation.batches.close()
        self.batches.close()

    def abandon(self) -> None:
        """Ends the parts of the job after an error, and does not wait for saves.

        Hosts may be gone, so errors of the parts are logged.
        """
        parts = [self.checkpointer.abandon] if self.checkpointer else []
        if self.evaluation:
            parts.append(self.evaluation.batches.close)
        for end in [*parts, self.batches.close]:
            try:
                end()
            except Exception as error:
                logging.warning("a part of a failed job cannot be ended: %r", error)

    def _open_log(self, start_step: int, number: int) -> step_log.StepLog | None:
        if not topology.is_primary():
            return None
        directory = run_directory.path_of(self.config)
        run_directory.write_config(directory, self.config)
        return step_log.StepLog(
            directory,
            start_step=start_step,
            world=self.world,
            data=dataclasses.asdict(self.config.data),
            number=number,
        )
