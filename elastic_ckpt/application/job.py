"""A job: the parts of a run in one world, over one mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
from absl import logging
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.application import initial_weights, run_directory
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.config import schema
from elastic_ckpt.core import allgather, errors, events, topology
from elastic_ckpt.data import batch_size
from elastic_ckpt.data.leaving_out import LeavingOut
from elastic_ckpt.data.state import Ranges
from elastic_ckpt.elastic import executables
from elastic_ckpt.training import evaluation, loop, rollback, step_log, train_step
from elastic_ckpt.training.callbacks import Action, Callbacks, Finding

# If a host dies meanwhile, the coordination service ends the others.
_COMPILE_TIMEOUT_SECS = 24 * 3600

# Returns the state after a number of steps, in the form of an abstract one, or None.
HandedOver = Callable[[int, Any], Any]


class Batches(loop.Batches, ocp.StatefulCheckpointable, Protocol):
    """The global batches of a run, open until they are closed."""

    @property
    def left_out(self) -> Ranges:
        """The rows that were left out, see `data.state`; all hosts ask together."""

    def leaving_out(self) -> LeavingOut:
        """A component in place of the data when the run goes back to a step."""

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
      callbacks: called for each step and evaluation.
      start_step: steps that are done already; 0 for a new run.
      emit: called for each event of the run.
      given: the configuration that the run was started with, if that of its hosts is
        another one.
    """

    config: schema.Config
    world: topology.Topology
    mesh: Mesh
    program: train_step.Program
    batches: Batches
    sizes: batch_size.Schedule
    checkpointer: run_saver.RunSaver | None
    evaluation: evaluation.Evaluation | None
    callbacks: Callbacks
    start_step: int
    emit: events.Emit
    given: schema.Config | None = None

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
          ConfigError: if the layout or the step of `init_from` does not fit.
        """
        # A run that has gone back to its beginning has a step 0.
        if self.checkpointer is None or self.checkpointer.latest_step is None:
            return self._new_state()
        self._note_skipped_weights()
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
        is_ending: Callable[[int], bool] = lambda _: False,
        is_left: Callable[[], bool] = lambda: False,
    ) -> loop.Ended:
        """Trains from `state` to the last step, or until asked to stop.

        When a callback has found a divergence it may go back to an older step, and
        continue from there with the data that comes next. Within `distrust_steps` of a
        restore from RAM it goes back to an older step in storage first, and repeats the
        data since then.

        Args:
          state: from `restore_or_init`; its buffers are donated.
          compiled: compiles the step; by default anew in each world.
          begin: called with the name of each phase that begins.
          is_stopping: called after each step; whether to save and end there, the same
            on all hosts.
          is_ending: see `Loop`.
          is_left: see `Loop`.
        """
        number = self.checkpointer.claim_world() if self.checkpointer else 0
        gather = functools.partial(
            allgather.of_this_world().gather, timeout_secs=_COMPILE_TIMEOUT_SECS
        )
        compiled = (
            compiled or executables.Executables(kept=None, emit=self.emit).compiled
        )
        trained = loop.Loop(
            program=self.program,
            batches=self.batches,
            sizes=self.sizes,
            log=None,
            saver=self.checkpointer,
            evaluation=self.evaluation,
            validation=self._validation(),
            callbacks=self.callbacks,
            emit=self.emit,
            compiled=_Compiled(compiled),
            begin=begin,
            barrier=functools.partial(gather, "compiled", None),
            is_stopping=is_stopping,
            is_ending=is_ending,
            # The supervisor's message may not have reached all hosts yet.
            is_left=lambda: any(gather("left", is_left())),
        )
        self._distrust_restore(int(state["step"]), begin)
        while True:
            start_step = int(state["step"])
            if trained.validation and start_step:
                trained.validation.restored(start_step)
            log = self._open_log(start_step, number)
            with contextlib.closing(log) if log else contextlib.nullcontext():
                ended = dataclasses.replace(trained, log=log).run(
                    state, start_step=start_step, steps=self.config.run.steps
                )
            finding = ended.finding
            if finding and finding.action is Action.DISTRUST:
                ended = self._restore_from_storage(ended)
                if ended.is_stopped:
                    return ended
                state = ended.state
                continue
            if finding and finding.is_divergence and finding.action is Action.STOP:
                begin("restore")
                self._leave_newest_good(finding)
            if ended.finding is None or ended.finding.action is not Action.ROLLBACK:
                return ended
            begin("restore")
            ended = self._go_back(ended, ended.finding, began_at=start_step)
            if ended.finding is not None or ended.is_stopped:
                return ended
            state = ended.state

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

    def abandon(self, *, alone: BaseException | None = None) -> None:
        """Ends the parts of the job after an error.

        Hosts may be gone, so errors of the parts are logged.

        Args:
          alone: the error, if there is no other host: then saves in flight are
            finished. Otherwise they are not waited for.
        """
        parts: list[Callable[[], None]] = []
        if self.checkpointer and alone is not None:
            parts.append(functools.partial(self.checkpointer.leave, alone))
        elif self.checkpointer:
            parts.append(self.checkpointer.abandon)
        if self.evaluation:
            parts.append(self.evaluation.batches.close)
        for end in [*parts, self.batches.close]:
            try:
                end()
            except Exception as error:
                logging.warning("a part of a failed job cannot be ended: %r", error)

    def _validation(self) -> validation_schedule.ValidationSchedule | None:
        saver = self.checkpointer
        return validation_schedule.configured(
            self.config.validation,
            self.emit,
            preserve=saver.preserve_newest if saver else lambda _: None,
        )

    def _new_state(self) -> train_step.TrainState:
        model = self.config.model
        if not model.init_from:
            return self.program.init()
        abstract = self.program.abstract_state
        if not model.init_from_optimizer:
            wanted = {initial_weights.PARAMS: abstract[initial_weights.PARAMS]}
            weights = initial_weights.load(model, wanted, self.emit)
            return self.program.begin(weights[initial_weights.PARAMS])
        state = initial_weights.load(model, abstract, self.emit)
        step, steps = int(state[initial_weights.STEP]), self.config.run.steps
        if not 0 <= step <= steps:
            raise errors.ConfigError(
                f"steps={steps}, but {model.init_from} is already at step {step}:"
                " steps counts from the beginning of that training; set it above"
                f" {step} to continue, or init_from_optimizer=false to begin at step 0"
            )
        self._resize(0, step)
        return state

    def _note_skipped_weights(self) -> None:
        path = self.config.model.init_from
        if path:
            self.emit("weights_skipped", path=path, step=self.start_step)

    def _distrust_restore(self, restored: int, begin: Callable[[str], None]) -> None:
        saver, within = self.checkpointer, self.config.divergence.distrust_steps
        if saver is None or not within:
            return

        def go_back(step: int, why: str) -> bool:
            # It waits for saves and backups, which is no hang of a step.
            begin("restore")
            if saver.distrust(step, why, within=within):
                return True
            begin("step")
            return False

        self.callbacks.distrust_until(restored + within, go_back)

    def _restore_from_storage(self, ended: loop.Ended) -> loop.Ended:
        # As if the loop had ended with the step that the checkpointer has gone back to.
        saver, rollbacks = self.checkpointer, self.callbacks.rollbacks
        assert saver is not None
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        state = saver.restore(self.program.abstract_state)
        step = saver.latest_step
        assert step is not None
        train_step.check_step(state, step)
        self.callbacks.go_on()
        self.callbacks.rollbacks = rollbacks
        self.batches.resize(self.sizes.at(step))
        return loop.Ended(state=state, step=step, is_stopped=ended.is_stopped)

    def _leave_newest_good(self, finding: Finding) -> None:
        # Steps that were saved since the divergence are abandoned, so that the next
        # start does not continue from one of them.
        saver = self.checkpointer
        saved = saver.complete() if saver else []
        step = rollback.good_step([s.step for s in saved], since=finding.since)
        if saver is None or step is None or step == saved[-1].step:
            return
        (good,) = (each for each in saved if each.step == step)
        state = saver.go_back(good, self.program.abstract_state, data=self.batches)
        saver.save_again(step, state)

    @property
    def _first_due(self) -> int:
        # The first step that a run saves; 0 if it cannot begin anew, with step 0.
        config = self.config
        if config.model.init_from_optimizer:
            return 0
        tiers = config.tiers
        if tiers.enable_multi_tier_checkpointing:
            return tiers.local_checkpoint_period
        return config.checkpoint.checkpoint_period

    def _go_back(
        self, ended: loop.Ended, finding: Finding, *, began_at: int
    ) -> loop.Ended:
        # As if the loop had ended with an older step, which is saved. If the run has to
        # end instead, the finding has the reason.
        began_secs = time.monotonic()
        saver, callbacks = self.checkpointer, self.callbacks
        saved = saver.complete() if saver else []
        try:
            step = rollback.choose(
                finding,
                [each.step for each in saved],
                rollbacks=callbacks.rollbacks,
                section=self.config.divergence,
                began_at=began_at,
                first_due=self._first_due,
            )
        except errors.DivergedError as error:
            why = dataclasses.replace(finding, action=Action.ABORT, why=str(error))
            return dataclasses.replace(ended, finding=why)
        assert saver is not None
        rollbacks = callbacks.rollbacks + 1
        read = self._read_to(callbacks.decided_step + 1, done=ended.step)
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        data = self.batches.leaving_out()
        good = next((each for each in saved if each.step == step), None)
        if good is None:
            state = self._new_state()
            data.leave_out(None)
            saver.begin_anew()
        else:
            state = saver.go_back(good, self.program.abstract_state, data=data)
        train_step.check_step(state, step)
        callbacks.rollbacks = rollbacks
        self._resize(read, step)
        saver.save_again(step, state)
        first, last = self.batches.left_out[-1]
        self.emit(
            "rolled_back",
            step=ended.step,
            to_step=step,
            rows=last - first,
            rollbacks=rollbacks,
            secs=time.monotonic() - began_secs,
        )
        return loop.Ended(state=state, step=step, is_stopped=ended.is_stopped)

    def _read_to(self, step: int, *, done: int) -> int:
        # Returns the last step whose batch was read, from 0. Mostly the loop has read
        # one more batch than callbacks have seen; so it always is, and the run always
        # continues with the same batch.
        for number in range(done, step):
            self._resize(number - 1, number)
            with contextlib.suppress(StopIteration):
                next(self.batches)
        return max(done, step) - 1

    def _resize(self, before: int, step: int) -> None:
        # Batches are of the size of step `before`.
        if self.sizes.at(step) != self.sizes.at(before):
            self.batches.resize(self.sizes.at(step))

    def _open_log(self, start_step: int, number: int) -> step_log.StepLog | None:
        # All hosts ask for it.
        left_out = self.batches.left_out
        if not topology.is_primary():
            return None
        directory = run_directory.path_of(self.config)
        run_directory.write_config(directory, self.given or self.config)
        return step_log.StepLog(
            directory,
            step_log.Start(
                step=start_step,
                world=self.world,
                data=dataclasses.asdict(self.config.data),
                number=number,
                left_out=left_out,
            ),
            detail=self.config.run.step_log,
        )


class _Compiled:
    """Compiles the step, or takes the last one for batches of the same size.

    Args:
      compiled: compiles it.
    """

    def __init__(self, compiled: loop.Compile) -> None:
        self._compiled = compiled
        self._rows = 0
        self._step: Callable[..., Any] | None = None

    def __call__(self, jitted: Any, *arguments: Any, step: int) -> Callable[..., Any]:
        _, batch = arguments
        rows = len(next(iter(batch.values())))
        if self._step is None or rows != self._rows:
            self._step = self._compiled(jitted, *arguments, step=step)
            self._rows = rows
        return self._step
