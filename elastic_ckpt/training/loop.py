"""The training loop of one host: computes, logs, evaluates and saves steps."""

from __future__ import annotations

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


class Loop:
    """Trains from a state to the last step, a decision, or the end of the data.

    Args:
      data: says when to evaluate, and how many batches.
      world: of this host.
      run: records the steps.
      program: of the model.
      batches: global batches, of the size of the first step.
      sizes: the batch size of each step.
      saver: None trains without checkpoints.
      evaluated: finite batches to evaluate; None evaluates never.
      validation: compares the copies of the state; None does not.
      callbacks: called for each step and evaluation; the loop ends with a decision.
    """

    def __init__(
        self,
        *,
        data: data_keys.DataKeys,
        world: World,
        run: RunDirectory,
        program: model.Program,
        batches: Batches,
        sizes: batch_size.Schedule,
        saver: RunSaver | None,
        evaluated: Batches | None,
        validation: ValidationSchedule | None,
        callbacks: Callbacks,
    ) -> None:
        self._data = data
        self._world = world
        self._run = run
        self._program = program
        self._batches = batches
        self._sizes = sizes
        self._saver = saver
        self._evaluated = evaluated
        self._validation = validation
        self._callbacks = callbacks
        self._hosts = allgather.new()
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
        done, saved, leaving = start_step, -1, False
        self._batches.begin_at(start_step)
        while done < steps and not leaving and self._callbacks.decision is None:
            self._world.begin("step")
            if self._sizes.at(done) != self._sizes.at(max(done - 1, start_step)):
                self._batches.resize(self._sizes.at(done))
            try:
                batch = next(self._batches)
            except StopIteration:
                self._catch_up()
                self._run.emit("data_ended", step=done)
                break
            state, report = self._compiled(done + 1, state, batch)(state, batch)
            self._catch_up()
            done += 1
            self._pending = (done, report)
            self._run.log(
                done,
                batch,
                loss=report.loss,
                tokens=report.tokens,
                learning_rate=report.learning_rate,
                _gradient_norm=report.gradient_norm,
                _rows=(report.example_id, report.row_digests),
            )
            leaving = done < steps and self._world.leaving(done) is not None
            if done == start_step + 1:
                # With it a change of slices is over, and a bad state may be found.
                self._catch_up()
            self._evaluate(done, state)
            is_last = done == steps or leaving
            saver = self._saver
            saving = saver and (leaving or saver.is_due(done, last=done == steps))
            self._validate(done, state, is_saving=bool(saving))
            if saving:
                self._catch_up()
                if self._callbacks.decision is None:
                    self._save(done, state, last=is_last)
                    # If the data ends here, other tiers lack it.
                    saved = done if is_last else -1
        self._catch_up()
        finding = self._callbacks.decision
        # A run that was complete already, or whose data has ended, may lack its last
        # checkpoint in storage.
        if done not in (0, saved) and self._is_end_due(done, finding):
            self._validate(done, state, is_saving=True)
            self._save(done, state, last=True)
        return Ended(state, done, leaving, finding)

    def _compiled(
        self, number: int, state: model.TrainState, batch: elastic_data.Batch
    ) -> model.Step:
        # A stage of the data may have rows of another length.
        form = tuple((each.shape, each.dtype) for each in jax.tree.leaves(batch))
        if form not in self._steps:
            step = self._program.step
            self._steps[form] = self._world.compiled(step, state, batch, step=number)
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
        if self._callbacks.reads(step):
            numbers = Report(
                loss=float(report.loss),
                gradient_norm=float(report.gradient_norm),
                tokens=int(report.tokens),
                learning_rate=float(report.learning_rate),
            )
            self._callbacks.after_step(step, numbers)

    def _evaluate(self, step: int, state: model.TrainState) -> None:
        # The mean loss in nats per target over the data from its beginning; padding in
        # the last batch is not counted.
        batches, data = self._evaluated, self._data
        if batches is None or step % data.eval_interval:
            return
        self._catch_up()
        if self._callbacks.is_distrusted:
            return
        self._world.begin("evaluate")
        began = time.monotonic()
        batches.reset()
        loss, targets, num_batches = 0.0, 0, 0
        while not data.eval_steps or num_batches < data.eval_steps:
            try:
                summed, count = self._program.evaluate(state, next(batches))
            except StopIteration:
                break
            loss, targets = loss + float(summed), targets + int(count)
            num_batches += 1
        mean, secs = loss / max(targets, 1), time.monotonic() - began
        self._run.emit(
            "evaluated", step=step, loss=mean, batches=num_batches, secs=secs
        )
        self._callbacks.after_evaluation(step, mean)
        if self._saver:
            self._saver.record(step, {EVAL_METRIC: mean})

    def _is_end_due(self, step: int, finding: Finding | None) -> bool:
        # Whether to save the step with which the loop ends; a bad one is not.
        if self._saver is None:
            return False
        if finding is None:
            return self._saver.is_due(step, last=True)
        return finding.action is Action.STOP and not finding.is_divergence

    def _validate(self, step: int, state: model.TrainState, *, is_saving: bool) -> None:
        if self._validation and self._validation.is_due(step, is_saving=is_saving):
            self._catch_up()
            self._world.begin("validate")
            components = {COMPONENT: self._callbacks.get_state()}
            self._validation.run(step, state, components=components)

    def _save(self, step: int, state: model.TrainState, *, last: bool) -> None:
        assert self._saver is not None
        self._world.begin("save")
        began = time.monotonic()
        self._saver.save(step, state, last=last)
        secs = time.monotonic() - began
        self._run.emit("save_blocked", step=step, secs=secs)
