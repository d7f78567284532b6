"""The training loop of one host: computes, logs, evaluates and saves steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from elastic_ckpt.checkpoint.components.validation_schedule import ValidationSchedule
from elastic_ckpt.checkpoint.run_saver import RunSaver
from elastic_ckpt.core import allgather
from elastic_ckpt.data import data_keys, elastic_data
from elastic_ckpt.data.iterator import Batches
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import batch_size, model
from elastic_ckpt.training.callbacks import (
    COMPONENT,
    Action,
    Callbacks,
    Finding,
    Report,
)
from elastic_ckpt.training.own_loop import RunDirectory

# The name of the mean loss among the metrics that rank a step.
EVAL_METRIC = "eval_loss"
# If a host dies meanwhile, the coordination service ends the others.
_COMPILE_TIMEOUT_SECS = 24 * 3600


class Ended(NamedTuple):
    """The result of a loop.

    Attributes:
      state: the state after the last step.
      step: the number of steps that are done.
      is_stopped: whether the hosts left before the last step.
      finding: of a callback, because of which it ended; None if none did. Its last step
        is saved if the action is to stop, and it is no divergence.
    """

    state: model.TrainState
    step: int
    is_stopped: bool
    finding: Finding | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Loop:
    """Trains from a state to the last step, a decision, or the end of the data.

    Attributes:
      data: says when to evaluate, and how many batches.
      world: of this host.
      recorded: the directory of the run, which logs the steps.
      program: of the model.
      batches: global batches, of the size of step 0.
      sizes: the batch size of each step.
      saver: None trains without checkpoints.
      evaluated: finite batches to evaluate; None evaluates never.
      validation: compares the copies of the state; None does not.
      callbacks: called for each step and evaluation; the loop ends with a decision.
    """

    data: data_keys.DataKeys
    world: World
    recorded: RunDirectory
    program: model.Program
    batches: Batches
    sizes: batch_size.Schedule
    saver: RunSaver | None
    evaluated: Batches | None
    validation: ValidationSchedule | None
    callbacks: Callbacks

    def __post_init__(self) -> None:
        self._hosts = allgather.new()
        # The step, from 0, of whose size the batches are.
        self._sized = 0
        # The compiled step, by the shapes and dtypes of a batch.
        self._steps: dict[Any, Callable[..., Any]] = {}
        # The last step, until callbacks have seen it.
        self._pending: tuple[int, model.StepReport] | None = None

    def run(self, state: model.TrainState, *, start_step: int, steps: int) -> Ended:
        """Trains from `state`, which is donated, until `steps` steps are done.

        Steps are logged one step behind the devices, which never wait for the log.
        Callbacks are called one step behind, too, and before a save, so that no step is
        saved that they have found to be bad.
        """
        done, leaving = start_step, False
        self.batches.begin_at(start_step)
        while done < steps and not leaving and self.callbacks.decision is None:
            self.world.begin("step")
            batch = self._next(done)
            if batch is None:
                self._catch_up()
                self.recorded.emit("data_ended", step=done)
                break
            state, report = self._compiled(done + 1, state, batch)(state, batch)
            self._catch_up()
            done += 1
            self._pending = (done, report)
            self.recorded.log(
                done,
                batch,
                loss=report.loss,
                tokens=report.tokens,
                learning_rate=report.learning_rate,
                _gradient_norm=report.gradient_norm,
                _rows=(report.example_id, report.row_digests),
            )
            leaving = done < steps and self.world.leaving(done) is not None
            if done == start_step + 1:
                # With it a change of slices is over, and a bad state may be found.
                self._catch_up()
            self._evaluate(done, state)
            is_due = self.saver is not None and (
                leaving or self.saver.is_due(done, last=done == steps)
            )
            self._validate(done, state, is_saving=is_due)
            if is_due:
                self._catch_up()
                if self.callbacks.decision is None:
                    self._save(done, state, last=done == steps or leaving)
        self._catch_up()
        finding = self.callbacks.decision
        is_rollback = finding is not None and finding.action is Action.ROLLBACK
        if is_rollback and done == self.callbacks.decided_step:
            # Mostly one more batch was read before they decided. So it always is, and
            # the run always goes on with the same batch.
            self._next(done)
        # A run that was complete already, or whose data has ended, may lack its last
        # checkpoint in storage.
        if done and self._is_end_due(done, finding):
            self._validate(done, state, is_saving=True)
            self._save(done, state, last=True)
        return Ended(state, done, leaving, finding)

    def _next(self, step: int) -> elastic_data.Batch | None:
        # The batch of a step, from 0; None if the data has ended.
        if self.sizes.at(step) != self.sizes.at(self._sized):
            self.batches.resize(self.sizes.at(step))
        self._sized = step
        try:
            return next(self.batches)
        except StopIteration:
            return None

    def _compiled(
        self, number: int, state: model.TrainState, batch: elastic_data.Batch
    ) -> model.Step:
        # A stage of the data may have rows of another length.
        form = tuple((each.shape, each.dtype) for each in jax.tree.leaves(batch))
        if form not in self._steps:
            step = self.program.step
            self._steps[form] = self.world.compiled(step, state, batch, step=number)
            # A collective on CPU fails if a host is more than 30 s late.
            self._hosts.gather("compiled", None, timeout_secs=_COMPILE_TIMEOUT_SECS)
        return self._steps[form]

    def _catch_up(self) -> None:
        # Waits until the pending step is computed: no host runs ahead of the one that
        # logs, as hosts leave after a step that all have begun.
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, report = pending
        jax.block_until_ready(report.loss)
        if self.callbacks.reads(step):
            numbers = Report(
                loss=float(report.loss),
                gradient_norm=float(report.gradient_norm),
                tokens=int(report.tokens),
                learning_rate=float(report.learning_rate),
            )
            self.callbacks.after_step(step, numbers)

    def _evaluate(self, step: int, state: model.TrainState) -> None:
        # The mean loss in nats per target over the data from its beginning; padding in
        # the last batch is not counted.
        batches = self.evaluated
        if batches is None or step % self.data.eval_interval:
            return
        self._catch_up()
        if self.callbacks.is_distrusted:
            return
        self.world.begin("evaluate")
        began = time.monotonic()
        batches.reset()
        loss, targets, num_batches = 0.0, 0, 0
        for batch in batches:
            summed, count = self.program.evaluate(state, batch)
            loss, targets = loss + float(summed), targets + int(count)
            num_batches += 1
            if num_batches == self.data.eval_steps:
                break
        mean, secs = loss / max(targets, 1), time.monotonic() - began
        self.recorded.emit(
            "evaluated", step=step, loss=mean, batches=num_batches, secs=secs
        )
        self.callbacks.after_evaluation(step, mean)
        if self.saver:
            self.saver.record(step, {EVAL_METRIC: mean})

    def _is_end_due(self, step: int, finding: Finding | None) -> bool:
        # Whether to save the step with which the loop ends, if it was not saved as the
        # last one yet; a bad one is not.
        if self.saver is None or self.saver.last_step == step:
            return False
        if finding is None:
            return self.saver.is_due(step, last=True)
        return finding.action is Action.STOP and not finding.is_divergence

    def _validate(self, step: int, state: model.TrainState, *, is_saving: bool) -> None:
        if self.validation and self.validation.is_due(step, is_saving=is_saving):
            self._catch_up()
            self.world.begin("validate")
            components = {COMPONENT: self.callbacks.get_state()}
            self.validation.run(step, state, components=components)

    def _save(self, step: int, state: model.TrainState, *, last: bool) -> None:
        assert self.saver is not None
        self.world.begin("save")
        began = time.monotonic()
        self.saver.save(step, state, last=last)
        secs = time.monotonic() - began
        self.recorded.emit("save_blocked", step=step, secs=secs)
