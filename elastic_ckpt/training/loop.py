"""The loop: batches in, steps out; each step is logged, some are saved."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Protocol

from elastic_ckpt.core import events
from elastic_ckpt.data import iterator
from elastic_ckpt.training import step_log, train_step


class Saver(Protocol):
    """Whatever saves the run."""

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to save now that `step` steps are done; `last` ends the run."""

    def save(self, step: int, state: train_step.TrainState) -> None:
        """Starts to save `state` and the position of the data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """What a training run goes through.

    Attributes:
      program: the compiled program.
      batches: endless global batches, at the position of the first step.
      log: the step log; None on the hosts that do not write it.
      saver: None trains without checkpoints.
      emit: hears of each step.
    """

    program: train_step.Program
    batches: Iterator[iterator.Batch]
    log: step_log.StepLog | None
    saver: Saver | None
    emit: events.Emit

    def run(
        self, state: train_step.TrainState, *, start_step: int, steps: int
    ) -> train_step.TrainState:
        """Trains from step `start_step` on until `steps` are done; returns the state.

        The log runs one step behind the devices, so that they never wait for it, and
        catches up before a checkpoint: what is saved is logged.
        """
        recorder = _Recorder(self.log, self.emit, steps)
        for step in range(start_step, steps):
            state, report = self.program.step(state, next(self.batches))
            recorder.take(step, report)
            done = step + 1
            if self.saver and self.saver.is_due(done, last=done == steps):
                recorder.catch_up()
                self.saver.save(done, state)
        recorder.catch_up()
        return state


class _Recorder:
    """Logs each step when the next one is under way."""

    def __init__(
        self, log: step_log.StepLog | None, emit: events.Emit, steps: int
    ) -> None:
        self._log = log
        self._emit = emit
        self._steps = steps
        self._pending: tuple[int, train_step.StepReport] | None = None
        self._since = time.monotonic()

    def take(self, step: int, report: train_step.StepReport) -> None:
        self._write_pending()
        self._pending = (step, report)

    def catch_up(self) -> None:
        """Writes what is pending and makes the log durable."""
        self._write_pending()
        if self._log:
            self._log.sync()

    def _write_pending(self) -> None:
        if self._pending is None or self._log is None:
            return
        step, report = self._pending
        self._pending = None
        loss = self._log.append(step, report)
        now = time.monotonic()
        self._emit(
            "step", step=step + 1, steps=self._steps, loss=loss, secs=now - self._since
        )
        self._since = now
