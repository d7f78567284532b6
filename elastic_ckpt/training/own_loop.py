"""The run directory of a loop of the user's own: what `elastic-ckpt train` records.

With it `elastic-ckpt status`, `report` and `audit` show and prove what they do for the
reference trainer's runs: from a step log, the events of the checkpointer, and metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import time
import types
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from elastic_ckpt.core import errors, events, metrics, storage, storage_cause, topology
from elastic_ckpt.data import elastic_data
from elastic_ckpt.elastic.world import World, between, is_claiming
from elastic_ckpt.inspect import run_files
from elastic_ckpt.inspect.run_files import RunRecord
from elastic_ckpt.tiers.choices import Chosen, Tier
from elastic_ckpt.training import (
    batch_log,
    configured,
    journal,
    listeners,
    run_directory,
    schema,
    step_record,
)


class RunDirectory:
    """Records a training loop of your own for the verbs `status`, `report` and `audit`.

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

    Every process of the loop makes one, after `jax.distributed.initialize`. In the
    training function of `ec.elastic.run` each world makes one, with its checkpointer:

        run = ec.RunDirectory("runs/mine", tiers=tiers, steps=1000, world=world)
        checkpointer = world.checkpointer(tiers, emit=run.emit)

    Args:
      directory: a path or URI for this run alone; created if it does not exist.
      tiers: the tiers of the loop's checkpointer, in which `status` and `audit` look.
      steps: the number of steps of the whole run; None if it is not known.
      step_log: what is logged of the data of each step: `"proof"`, from which an audit
        names the rows that differ, or `"summary"`, a digest.
      world: of an elastic run, which it reports events to. Where it may run on several
        machines, the claims of worlds decide between them, and no lock.
      emit: called with each event; by default that of `world`.

    Raises:
      RunError: if another live process records in the directory.
      ConfigError: if the tiers do not fit together, or `step_log` is neither.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        tiers: Sequence[Tier],
        steps: int | None = None,
        step_log: str = step_record.PROOF,
        world: World | None = None,
        emit: events.Emit | None = None,
        # Of a program that has one; then the supervisor of `world` keeps the events.
        _config: schema.Config | None = None,
    ) -> None:
        details = (step_record.PROOF, step_record.SUMMARY)
        if step_log not in details:
            raise errors.ConfigError(
                f"RunDirectory: step_log={step_log!r}; choose one of {details}"
            )
        chosen = Chosen.from_choices(tiers)
        path = os.fspath(storage.absolute(directory))
        self._name = os.path.basename(path.rstrip("/"))
        self._directory = path
        self._steps = steps
        slices = 1 if _config is None else _config.world.slices
        self._world = topology.present(slices) if world is None else world.topology
        self._resumes = (lambda: False) if world is None else between(world).resumes
        self._has_local = chosen.local is not None
        if _config is None:
            record = _record(self._name, chosen, path)
        else:
            record = configured.record(_config, program="maxtext")
        self._log = batch_log.BatchLog(
            path, world=self._world, data=record.data or {}, detail=step_log
        )
        self._done = 0
        self._first_step = record.first_step
        # The number of steps that are done in the one that was saved last.
        self._saved = 0
        self._began_secs = self._since_secs = time.monotonic()
        # The event of the last step, until its loss is needed.
        self._pending: dict[str, Any] | None = None
        self._closing = contextlib.ExitStack()
        # What keeps the events; None on all hosts but one.
        self._journal: events.Emit | None = None
        metrics_of = None if _config is None else _config.metrics
        self._closing.enter_context(listeners.running(path, metrics_of))
        if emit is None:
            emit = events.nobody if world is None else world.emit
        if topology.is_primary():
            if _config is not None and world is not None:
                self._journal = emit
            else:
                # A host of a machine that stands still would hold the lock.
                self._journal = self._closing.enter_context(
                    journal.kept_in(
                        path,
                        emit,
                        steps=record.steps_directory,
                        is_locked=world is None or not is_claiming(world),
                    )
                )
            run_files.write(path, record)
        self._closing.callback(self._log.close)

    def emit(self, name: str, **fields: storage.Json) -> None:
        """Records an event, from any thread; give it to `ec.Checkpointer(emit=)`.

        A loop that reports `data_ended` is done.
        """
        if name == "save_started":
            if self._pending is not None and self._pending["loss"] is not None:
                self._show_pending()
            self._saved = int(str(fields["step"])) + 1 - self._first_step
            self._sync()
        elif name == "data_ended":
            self._steps = self._done
        if self._journal is not None:
            self._journal(name, **fields)

    def log(
        self,
        step: int,
        batch: elastic_data.Batch,
        *,
        loss: float | jax.Array | None = None,
        tokens: int | None = None,
        learning_rate: float | jax.Array | None = None,
    ) -> None:
        """Logs one step; every process calls it alike, before it saves the step.

        It does not wait for the step to be computed: its record is written while the
        next one runs.

        Args:
          step: the number of steps that are done, this one included, which is also the
            number that it is saved under. A number that does not follow the last one is
            where a restarted loop continues.
          batch: the global batch from `ec.batches`, with `example_id`.
          loss: the loss of the step, a scalar; None if it is not to be reported.
          tokens: the number of tokens in the batch, for tokens a second.
          learning_rate: the learning rate of the step.

        Raises:
          ConfigError: if `step` is not positive, or the batch has no `example_id`.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise errors.ConfigError(
                f"RunDirectory.log: step is a {type(step).__name__}; give the number of"
                " steps that are done, and then the batch: log(step, batch)"
            ) from None
        if step < 1:
            raise errors.ConfigError(
                f"RunDirectory.log: step={step}; give the number of steps that are done"
                " with this one, from 1"
            )
        self._show_pending()
        number = step - 1
        if self._log.next_step != number:
            self._log.begin(number)
            self.emit(
                "run_started",
                run=self._name,
                **dataclasses.asdict(self._world),
                start_step=number,
                steps=self._steps,
            )
        self._log.take(batch, loss=loss)
        self._done = step
        now = time.monotonic()
        self._pending = {
            "step": step,
            "steps": self._steps,
            "loss": loss,
            "secs": now - self._since_secs,
            "tokens": tokens,
            "learning_rate": learning_rate,
        }
        self._since_secs = now

    def log_metrics(
        self,
        step: int,
        *,
        loss: float | jax.Array,
        tokens: int | jax.Array | None = None,
        learning_rate: float | jax.Array | None = None,
    ) -> None:
        """Adds to the step that was logged last what was not known then; see `log`."""
        if self._pending is not None and self._pending["step"] == step:
            more = {"loss": loss, "tokens": tokens, "learning_rate": learning_rate}
            self._pending |= more
        self._log.note_loss(step - 1, loss)

    def close(self) -> None:
        """Writes what is left, and records the end of the run."""
        self.__exit__(None, None, None)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._show_pending()
        if error is None and self._journal is not None and self._done:
            is_done = self._steps is None or self._done >= self._steps
            resumes = self._resumes()
            if is_done and not resumes:
                secs = time.monotonic() - self._began_secs
                self.emit("run_finished", step=self._done, secs=secs)
            else:
                # If no other world follows, none makes the backup.
                is_lent = resumes and self._has_local
                is_saved = self._saved == self._done and not is_lent
                self.emit("run_stopped", step=self._done, saved=is_saved)
        # The journal notes why a run failed.
        self._closing.__exit__(kind, error, trace)

    def _show_pending(self) -> None:
        # One step late, so that the loop does not wait for a loss.
        fields, self._pending = self._pending, None
        if fields is None or self._journal is None:
            return
        for key, number in (("loss", float), ("tokens", int), ("learning_rate", float)):
            if fields[key] is not None:
                fields[key] = number(fields[key])
        self._journal("step", **fields)

    def _sync(self) -> None:
        why = self._log.sync()
        if why is None or self._journal is None:
            return
        metrics.CHECKPOINT_FAILURES.record(1)
        why = f"the step log is not written, and tried again: {why}"
        storage_cause.report(self._journal, "persistent", self._done, why)


def _record(run: str, chosen: Chosen, directory: str) -> RunRecord:
    steps, every = run_directory.steps_of(directory), 0
    if chosen.persistent is not None:
        steps, every = chosen.persistent.directory, chosen.persistent.every
    ram = () if chosen.local is None else (chosen.local.directory,)
    return RunRecord(
        run=run,
        program="loop",
        steps_directory=os.fspath(storage.absolute(steps)),
        every=every,
        at_end=False,
        ram=tuple(os.fspath(storage.absolute(each)) for each in ram),
        first_step=1,
        data=None,
        settings={},
    )
