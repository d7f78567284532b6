"""A training loop's run directory, which `status`, `report` and `audit` read.

It contains a step log, the run's events, and metrics. The reference trainer and MaxText
use it like any other loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import time
import types
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from etils import epath

from elastic_ckpt.core import (
    background,
    errors,
    events,
    metrics,
    storage,
    storage_cause,
    topology,
)
from elastic_ckpt.data import elastic_data
from elastic_ckpt.data.state import Ranges
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.inspect import run_files
from elastic_ckpt.inspect.run_files import RunRecord
from elastic_ckpt.tiers.choices import Chosen, Tier
from elastic_ckpt.training import journal, schema, step_log


class RunDirectory:
    """Records your own training loop for `status`, `report` and `audit`.

        with (
            ec.RunDirectory("runs/mine", tiers=tiers, steps=1000) as run,
            ec.Checkpointer(tiers, emit=run.emit) as checkpointer,
        ):
            ...
            for step in range(first_step + 1, 1001):
                batch = next(batches)
                state, loss = train_step(state, batch)
                run.log(step, batch, loss=loss)
                checkpointer.save_checkpointables_async(step, {...})

    Every process of the loop creates one after calling `jax.distributed.initialize`. In
    the training function of `ec.elastic.run`, create one for each world, along with the
    world's checkpointer:

        run = ec.RunDirectory("runs/mine", tiers=tiers, steps=1000, world=world)
        checkpointer = world.checkpointer(tiers, emit=run.emit)

    Args:
      directory: the run's own path or URI; created if it does not exist.
      tiers: the tiers of the loop's checkpointer, which `status` and `audit` search.
      steps: the number of steps in the whole run; None if unknown.
      world: the world of an elastic run, which receives the events. If the run may use
        multiple machines, world claims decide which one records, instead of a lock.
      emit: called with each event, from any thread; by default `world.emit`.

    Raises:
      RunError: if another live process records in the directory.
      ConfigError: if the tiers are incompatible.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        tiers: Sequence[Tier],
        steps: int | None = None,
        world: World | None = None,
        emit: events.Emit | None = None,
        # For programs with a configuration: their part of the record, and listeners. In
        # a world, the process that started the world records the events and metrics.
        _record: Mapping[str, Any] | None = None,
        _metrics: schema.MetricsSection | None = None,
    ) -> None:
        path = os.fspath(storage.absolute(directory))
        self._directory, self._steps = path, steps
        chosen = Chosen.from_choices(tiers)
        self._has_local = chosen.local is not None
        self._record = dataclasses.replace(_of_loop(path, chosen), **(_record or {}))
        slices = int(self._record.settings.get("slices", 1))
        self._world = topology.present(slices) if world is None else world.topology
        self._between = BetweenWorlds() if world is None else world._between
        # The number of completed steps (None before the first), and the newest saved
        # step.
        self._done: int | None = None
        self._saved = 0
        self._claim = 0
        self._began_secs = self._since_secs = time.monotonic()
        # The event of the last step, until its loss is known or the next step begins.
        self._event: dict[str, Any] | None = None
        # The work that the thread has yet to do for the last step.
        self._late: list[futures.Future[None]] = []
        self._log: step_log.StepLog | None = None
        # Records the events, on one host.
        self._journal: events.Emit = events.nobody
        is_own, is_primary = _record is None or world is None, topology.is_primary()
        listeners = journal.listening(path, _metrics or schema.MetricsSection())
        with contextlib.ExitStack() as closing:
            if is_primary:
                nobody = events.nobody if world is None else world.emit
                self._journal = emit or nobody
            if is_own and is_primary:
                claimant = self._between.claimant
                self._journal = closing.enter_context(
                    journal.kept(
                        path,
                        self._journal,
                        steps=self._record.steps_directory,
                        first_step=self._record.first_step,
                        listeners=listeners,
                        # A host on a frozen machine would still hold the lock.
                        is_locked=claimant is None or claimant.owner is not None,
                    )
                )
            elif is_own:
                closing.enter_context(listeners)
            self._thread = background.pool(1, "step log")
            closing.callback(self._thread.shutdown)
            closing.push(self._end)
            self._closing = closing.pop_all()

    def emit(self, name: str, **fields: storage.Json) -> None:
        """Records an event; pass this method to `ec.Checkpointer(emit=)`.

        The `data_ended` event means that the run has completed its last step.
        """
        if name == "save_started":
            self._sync()
        elif name in ("saved", "restored_from"):
            done = int(str(fields["step"])) + 1 - self._record.first_step
            self._saved = max(self._saved, done)
        elif name == "world_claimed":
            self._claim = int(str(fields["world"]))
        elif name == "data_ended":
            self._catch_up()
            self._steps = self._done
        self._journal(name, **fields)

    def log(
        self,
        step: int,
        batch: elastic_data.Batch,
        *,
        loss: float | jax.Array | None = None,
        tokens: int | jax.Array | None = None,
        learning_rate: float | jax.Array | None = None,
        _gradient_norm: jax.Array | None = None,
        _rows: tuple[jax.Array, jax.Array] | None = None,
    ) -> None:
        """Logs one step; every process must call this method before it saves the step.

        This method waits only for the previous step to be computed: a thread writes a
        step's record while the next step runs.

        Args:
          step: the number of completed steps, including this one; also the number under
            which the step is saved. A number that does not follow the last one means
            that the loop restarted at that step.
          batch: the global batch from `ec.batches`, with `example_id`.
          loss: the loss of the step, a scalar; None if unknown.
          tokens: the number of tokens in the batch, to report tokens per second.
          learning_rate: the learning rate of the step.

        Raises:
          ConfigError: if `step` is not positive or the batch has no `example_id`.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise errors.ConfigError(
                f"RunDirectory.log: step is of type {type(step).__name__}; pass the"
                " number of completed steps first, and then the batch: log(step, batch)"
            ) from None
        if step < 1:
            raise errors.ConfigError(
                f"RunDirectory.log: step={step}, but the first step is 1; pass the"
                " number of completed steps, including this one"
            )
        rows = _rows or step_log.digested(batch)
        self._catch_up()
        if self._done != step - 1:
            self._start(step - 1)
        now, since = time.monotonic(), self._since_secs
        self._done, self._since_secs = step, now
        if self._log is None:
            metrics.TRAIN_STEPS.record(step)
        else:
            self._late.append(
                self._thread.submit(self._log.write, step - 1, *rows, loss)
            )
        self._event = {
            "step": step,
            "steps": self._steps,
            "loss": loss,
            "secs": now - since,
            "tokens": tokens,
            "learning_rate": learning_rate,
            "gradient_norm": _gradient_norm,
        }
        if loss is not None:
            self._report()

    def log_metrics(
        self,
        step: int,
        *,
        loss: float | jax.Array,
        tokens: int | jax.Array | None = None,
        learning_rate: float | jax.Array | None = None,
    ) -> None:
        """Adds newly known values to the last logged step; see `log`."""
        if self._event is not None and self._event["step"] == step:
            more = {"loss": loss, "tokens": tokens, "learning_rate": learning_rate}
            self._event |= {k: v for k, v in more.items() if v is not None}
            self._report()

    def close(self) -> None:
        """Writes pending records and records the end of the run."""
        self.__exit__(None, None, None)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # The journal records why a run failed.
        self._closing.__exit__(kind, error, trace)

    def _start(self, done: int) -> None:
        # Reports that the loop starts or restarts with the step after `done`.
        self._begin(done)
        # The audit expects an attempt for each `run_started` event.
        self._wait()
        self.emit(
            "run_started",
            run=self._record.run,
            **dataclasses.asdict(self._world),
            start_step=done,
            steps=self._steps,
        )

    def _begin(self, done: int, left_out: Ranges = ()) -> None:
        # Begins an attempt, whose first step is the one after `done`.
        self._catch_up()
        self._done = done
        # Later steps are retrained.
        self._saved = min(self._saved, done)
        if topology.is_primary():
            # In the thread, so that the first step does not wait.
            self._late.append(self._thread.submit(self._open, done, left_out))

    def _open(self, done: int, left_out: Ranges) -> None:
        self._close_log()
        # Not earlier: a rejected launch must not replace the record of the run.
        run_files.write(self._directory, self._record)
        self._log = step_log.StepLog(
            *(self._directory, done),
            world=self._world,
            data=self._record.data or {},
            claim=self._claim,
            left_out=left_out,
        )

    def _end(self, kind: type[BaseException] | None, *_: Any) -> None:
        # The error of a step lost with its devices must not hide the run's error.
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            try:
                self._catch_up()
            finally:
                self._close_log()
        if kind or self._done is None:
            return
        is_done = self._steps is None or self._done >= self._steps
        resumes = self._between.resumes()
        if is_done and not resumes:
            self.emit(
                "run_finished",
                step=self._done,
                secs=time.monotonic() - self._began_secs,
            )
        else:
            # The next world backs up a step in RAM, if there is one.
            is_lent = resumes and self._has_local
            is_saved = self._saved == self._done and not is_lent
            self.emit("run_stopped", step=self._done, saved=is_saved)

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _report(self) -> None:
        # Reports the last step in the thread, with the values known so far.
        event, self._event = self._event, None
        if event is not None and self._log is not None:
            self._late.append(self._thread.submit(self._show, event))

    def _wait(self) -> None:
        # Waits until the last step is written. A step that could not be written must
        # never be saved; after an interrupt, the next call waits again.
        while self._late:
            self._late[0].result()
            del self._late[0]

    def _catch_up(self) -> None:
        self._report()
        self._wait()

    def _sync(self) -> None:
        # Makes the records of all steps so far durable.
        self._wait()
        why = None if self._log is None else self._log.sync()
        if why is not None:
            metrics.CHECKPOINT_FAILURES.record(1)
            advice = storage_cause.advice(why) or "restore access to the storage"
            why = (
                f"the step log cannot be written, so each step retries: {why}; {advice}"
            )
            storage_cause.report(self._journal, "persistent", self._done or 0, why)

    def _show(self, event: dict[str, Any]) -> None:
        # Called in the thread.
        numbers = jax.tree.map(lambda each: np.asarray(each).item(), event)
        norm = numbers.pop("gradient_norm")
        metrics.TRAIN_STEPS.record(numbers["step"])
        if norm is not None:
            metrics.TRAIN_GRADIENT_NORM.record(norm)
        self._journal("step", **numbers)


def _of_loop(directory: str, chosen: Chosen) -> RunRecord:
    # The record of a loop without a configuration.
    steps, every = journal.steps_of(directory), 0
    if chosen.persistent is not None:
        steps, every = chosen.persistent.directory, chosen.persistent.every
    ram = () if chosen.local is None else (chosen.local.directory,)
    return RunRecord(
        run=os.path.basename(directory.rstrip("/")),
        program="loop",
        steps_directory=os.fspath(storage.absolute(steps)),
        every=every,
        at_end=False,
        ram=tuple(os.fspath(storage.absolute(each)) for each in ram),
        first_step=1,
        data=None,
        settings={},
    )
