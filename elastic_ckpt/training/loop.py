"""The training loop: computes, logs, evaluates and saves steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, Protocol

import jax
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.checkpoint.run_saver import RunSaver
from elastic_ckpt.core import background, events, metrics, storage_cause
from elastic_ckpt.data import elastic_data
from elastic_ckpt.data.iterator import LeavingOut
from elastic_ckpt.data.state import Ranges
from elastic_ckpt.training import batch_size, step_log, train_step
from elastic_ckpt.training.callbacks import COMPONENT as CALLBACKS
from elastic_ckpt.training.callbacks import Action, Callbacks, Finding, Report

# The name of the mean loss among the metrics that rank a step.
EVAL_METRIC = "eval_loss"


class Batches(ocp.StatefulCheckpointable, Protocol):
    """The global batches of a run, open until they are closed."""

    def __next__(self) -> elastic_data.Batch:
        """The next batch; StopIteration at the end, on all hosts at once."""

    def resize(self, global_batch_size: int) -> None:
        """Continues with batches of another size."""

    def begin_at(self, step: int) -> None:
        """Says of which step the next batch is; a stage of the data may begin there."""

    @property
    def left_out(self) -> Ranges:
        """The rows that were left out, see `data.state`; all hosts ask together."""

    def leaving_out(self) -> LeavingOut:
        """A component in place of the data when the run goes back to a step."""

    def close(self) -> None:
        """Ends the threads and workers that read ahead."""


class Compile(Protocol):
    """Compiles a jitted step."""

    def __call__(self, jitted: Any, *arguments: Any, step: int) -> Callable[..., Any]:
        """The compiled `jitted` for `arguments`, as the program of step `step`."""


class Restartable(Protocol):
    """Finite global batches that can start again."""

    def __next__(self) -> elastic_data.Batch:
        """The next batch; StopIteration at the end, on all hosts at once."""

    def reset(self) -> None:
        """Moves to the beginning."""

    def close(self) -> None:
        """Stops reading ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The periodic evaluation of a run.

    Attributes:
      evaluate: the `evaluate` function of the program.
      batches: finite global batches; padding in the last one is not counted.
      interval: training steps between two evaluations.
      max_batches: the most batches of an evaluation; 0 takes all.
      emit: called after each evaluation.
    """

    evaluate: Callable[
        [train_step.TrainState, elastic_data.Batch], tuple[jax.Array, jax.Array]
    ]
    batches: Restartable
    interval: int
    max_batches: int
    emit: events.Emit

    def is_due(self, step: int) -> bool:
        """Whether to evaluate now that `step` steps are done."""
        return step % self.interval == 0

    def run(self, step: int, state: train_step.TrainState) -> float:
        """The mean loss in nats per target, over the data from its beginning."""
        began = time.monotonic()
        self.batches.reset()
        loss, targets, num_batches = 0.0, 0, 0
        while not self.max_batches or num_batches < self.max_batches:
            try:
                batch = next(self.batches)
            except StopIteration:
                break
            summed, count = self.evaluate(state, batch)
            loss, targets = loss + float(summed), targets + int(count)
            num_batches += 1
        mean = loss / max(targets, 1)
        secs = time.monotonic() - began
        self.emit("evaluated", step=step, loss=mean, batches=num_batches, secs=secs)
        return mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a loop.

    Attributes:
      state: the state after the last step.
      step: the number of steps that are done.
      is_stopped: whether it was stopped before its last step.
      finding: of a callback, because of which it ended; None if none did. Its last step
        is saved if the action is to stop, and it is no divergence.
    """

    state: train_step.TrainState
    step: int
    is_stopped: bool
    finding: Finding | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The training loop of one host.

    Attributes:
      program: the compiled program.
      batches: global batches, of the size of the first step.
      sizes: the batch size of each step.
      log: the step log; None on the hosts that do not write it.
      saver: None trains without checkpoints.
      evaluation: None trains without evaluation.
      validation: compares copies of the state; None does not.
      callbacks: called for each step and evaluation; the loop ends with a decision.
      emit: called for each step, after each save, and before and after compiling.
      compiled: compiles the step for its arguments, given the number of the step; emits
        the events.
      begin: called with the name of each phase that begins: `step`, `evaluate`,
        `validate`, `save`.
      barrier: returns when all hosts have called it. It is called after
        compiling, because a collective on CPU fails if a host is more than 30 s late.
      leaving: see `World.leaving`; called after each step but the last.
    """

    program: train_step.Program
    batches: Batches
    sizes: batch_size.Schedule
    saver: RunSaver | None
    evaluation: Evaluation | None
    emit: events.Emit
    compiled: Compile
    log: step_log.StepLog | None = None
    validation: validation_schedule.ValidationSchedule | None = None
    callbacks: Callbacks = dataclasses.field(default_factory=Callbacks)
    begin: Callable[[str], None] = lambda _: None
    barrier: Callable[[], object] = lambda: None
    leaving: Callable[[int], object] = lambda _: None

    def run(
        self, state: train_step.TrainState, *, start_step: int, steps: int
    ) -> Ended:
        """Trains from step `start_step` until `steps` are done or the data ends.

        The log is written one step behind the devices, in a thread of its own, so that
        they never wait for it, except for the first step, with which a change of slices
        is over. It catches up before a checkpoint, so that every saved step is logged.
        Callbacks are called one step behind, too, and before a checkpoint, so that no
        step is saved that they have found to be bad.
        """
        with _Recorder(self.log, self.emit, steps, self.callbacks) as recorder:
            return self._run(recorder, state, start_step=start_step, steps=steps)

    def _run(
        self,
        recorder: _Recorder,
        state: train_step.TrainState,
        *,
        start_step: int,
        steps: int,
    ) -> Ended:
        done, saved = start_step, -1
        stopping = False
        step = self.program.step
        self.batches.begin_at(start_step)
        form: list[Any] = []
        while done < steps and not stopping and self.callbacks.decision is None:
            self.begin("step")
            if self.sizes.at(done) != self.sizes.at(max(done - 1, start_step)):
                self.batches.resize(self.sizes.at(done))
            try:
                batch = next(self.batches)
            except StopIteration:
                recorder.catch_up()
                self.emit("data_ended", step=done)
                break
            # A stage of the data may have rows of another length.
            before, leaves = form, jax.tree.leaves(batch)
            form = [(each.shape, each.dtype) for each in leaves]
            if form != before:
                step = self._compiled(done + 1, state, batch)
            state, report = step(state, batch)
            recorder.take(done, report)
            done += 1
            # Before it is logged: a step that was reported is saved at a signal.
            stopping = done < steps and self.leaving(done) is not None
            if done == start_step + 1:
                recorder.write_pending()
            if self.evaluation and self.evaluation.is_due(done):
                recorder.catch_up()
                if not self.callbacks.is_distrusted:
                    self._evaluate(self.evaluation, done, state)
            last = done == steps
            saver = self.saver
            saving = saver and (stopping or saver.is_due(done, last=last))
            self._validate(done, state, recorder, is_saving=bool(saving))
            if saving:
                recorder.catch_up()
                if self.callbacks.decision is None:
                    self._save(done, state, last=last or stopping)
                    # If the data ends here, other tiers lack it.
                    saved = done if last or stopping else -1
        recorder.catch_up()
        finding = self.callbacks.decision
        # A run that was complete already, or whose data has ended, may lack its last
        # checkpoint in storage.
        if done not in (0, saved) and self._is_end_due(done, finding):
            self._validate(done, state, recorder, is_saving=True)
            self._save(done, state, last=True)
        return Ended(state=state, step=done, is_stopped=stopping, finding=finding)

    def _evaluate(
        self, evaluated: Evaluation, step: int, state: train_step.TrainState
    ) -> None:
        self.begin("evaluate")
        loss = evaluated.run(step, state)
        self.callbacks.after_evaluation(step, loss)
        if self.saver:
            self.saver.record(step, {EVAL_METRIC: loss})

    def _is_end_due(self, step: int, finding: Finding | None) -> bool:
        # Whether to save the step with which the loop ends; a bad one is not.
        if self.saver is None:
            return False
        if finding is None:
            return self.saver.is_due(step, last=True)
        return finding.action is Action.STOP and not finding.is_divergence

    def _validate(
        self,
        step: int,
        state: train_step.TrainState,
        recorder: _Recorder,
        *,
        is_saving: bool,
    ) -> None:
        if self.validation and self.validation.is_due(step, is_saving=is_saving):
            recorder.catch_up()
            self.begin("validate")
            components = {CALLBACKS: self.callbacks.get_state()}
            self.validation.run(step, state, components=components)

    def _save(self, step: int, state: train_step.TrainState, *, last: bool) -> None:
        assert self.saver is not None
        self.begin("save")
        began_secs = time.monotonic()
        self.saver.save(step, state, last=last)
        self.emit("save_blocked", step=step, secs=time.monotonic() - began_secs)

    def _compiled(
        self, number: int, state: train_step.TrainState, batch: elastic_data.Batch
    ) -> train_step.Step:
        step = self.compiled(self.program.step, state, batch, step=number)
        self.barrier()
        return step


class _Recorder:
    """Logs each step, and calls the callbacks, while the next one is computed.

    Used as a context. The log and the events are written by another thread: the loop's
    own gives the devices their next step, and does nothing else meanwhile.
    """

    def __init__(
        self,
        log: step_log.StepLog | None,
        emit: events.Emit,
        steps: int,
        callbacks: Callbacks,
    ) -> None:
        self._log = log
        self._emit = emit
        self._steps = steps
        self._callbacks = callbacks
        self._pending: tuple[int, train_step.StepReport] | None = None
        self._done = 0
        self._since = time.monotonic()
        self._thread = background.pool(1, "step log") if log is not None else None
        # Of the step before the pending one.
        self._written: futures.Future[None] | None = None

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def take(self, step: int, report: train_step.StepReport) -> None:
        self.write_pending()
        self._pending = (step, report)
        self._done = step + 1

    def catch_up(self) -> None:
        """Writes the pending step, and makes the log durable if storage takes it."""
        self.write_pending()
        self._wait()
        why = self._log.sync() if self._log else None
        if why is not None:
            metrics.CHECKPOINT_FAILURES.record(1)
            advice = storage_cause.advice(why) or "bring the storage back"
            why = f"the step log is not written, and tried again: {why}; {advice}"
            storage_cause.report(self._emit, "persistent", self._done, why)

    def write_pending(self) -> None:
        """Begins to write the step that was taken last, when it is computed."""
        if self._pending is None:
            return
        step, report = self._pending
        self._pending = None
        # No host runs ahead of the one that logs: hosts that leave do so after a step
        # that all have begun.
        jax.block_until_ready(report.loss)
        if self._thread is None:
            metrics.TRAIN_STEPS.record(step + 1)
        else:
            self._wait()
            self._written = self._thread.submit(self._write, step, report)
        if self._callbacks.reads(step + 1):
            self._callbacks.after_step(step + 1, _numbers(report))

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            background.wait([written])
            written.result()

    def _write(self, step: int, report: train_step.StepReport) -> None:
        assert self._log is not None
        metrics.TRAIN_STEPS.record(step + 1)
        numbers = _numbers(report)
        self._log.append(step, report)
        metrics.TRAIN_GRADIENT_NORM.record(numbers.gradient_norm)
        now = time.monotonic()
        self._emit(
            "step",
            step=step + 1,
            steps=self._steps,
            loss=numbers.loss,
            secs=now - self._since,
            tokens=numbers.tokens,
            learning_rate=numbers.learning_rate,
        )
        self._since = now


def _numbers(report: train_step.StepReport) -> Report:
    # Waits until the step is computed.
    loss, gradient_norm, tokens, learning_rate = jax.device_get(
        (report.loss, report.gradient_norm, report.tokens, report.learning_rate)
    )
    return Report(
        loss=float(loss),
        gradient_norm=float(gradient_norm),
        tokens=int(tokens),
        learning_rate=float(learning_rate),
    )
