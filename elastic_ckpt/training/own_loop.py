"""The run directory of a training loop: what `status`, `report` and `audit` read.

It has a step log, the events of the run, and metrics. The reference trainer and MaxText
record themselves in it as any other loop does.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
import os
import time
import types
from collections.abc import Callable, Sequence
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
from elastic_ckpt.elastic.world import BetweenWorlds, World, between
from elastic_ckpt.inspect import run_files
from elastic_ckpt.inspect.run_files import RunRecord
from elastic_ckpt.tiers.choices import Chosen, Local, Tier
from elastic_ckpt.training import (
    configured,
    journal,
    schema,
    step_log,
)

# The most records and events that are not written yet: then the loop waits.
_MOST_LATE = 4


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
      world: of an elastic run, which it reports events to. Where it may run on several
        machines, the claims of worlds decide between them, and no lock.
      emit: called with each event, from any thread; by default that of `world`.

    Raises:
      RunError: if another live process records in the directory.
      ConfigError: if the tiers do not fit together.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        tiers: Sequence[Tier],
        steps: int | None = None,
        world: World | None = None,
        emit: events.Emit | None = None,
        # Of a program that has one; then the supervisor of `world` keeps the events.
        _config: schema.Config | None = None,
        _program: str = "train",
    ) -> None:
        path = os.fspath(storage.absolute(directory))
        self._directory, self._steps = path, steps
        if _config is None:
            self._record, slices = _record(path, Chosen.from_choices(tiers)), 1
        else:
            self._record = configured.record(_config, program=_program)
            slices = _config.world.slices
        self._world = topology.present(slices) if world is None else world.topology
        shared = BetweenWorlds() if world is None else between(world)
        self._resumes = shared.resumes
        self._has_local = any(isinstance(each, Local) for each in tiers)
        # The steps that are done; None before the first. And those of the newest save.
        self._done: int | None = None
        self._saved = 0
        self._claim = 0
        self._began_secs = self._since_secs = time.monotonic()
        # The event of the last step, until its loss is known or the next step begins.
        self._pending: dict[str, Any] | None = None
        # What the thread of the log has yet to do; it alone uses the log.
        self._late: collections.deque[futures.Future[Any]] = collections.deque()
        self._log: step_log.StepLog | None = None
        # What keeps the events; None on all hosts but one.
        self._journal: events.Emit | None = None
        with contextlib.ExitStack() as closing:
            # The process of a single controller has listeners of its own.
            if _config is None or world is None or world.devices is None:
                section = (_config or schema.Config()).metrics
                closing.enter_context(journal.listening(path, section))
            if topology.is_primary():
                nobody = events.nobody if world is None else world.emit
                self._journal = emit or nobody
                if _config is None or world is None:
                    # A host of a machine that stands still would hold the lock.
                    claimant = shared.claimant
                    is_locked = claimant is None or claimant.owner is not None
                    steps_directory = self._record.steps_directory
                    self._journal = closing.enter_context(
                        journal.kept(
                            path,
                            self._journal,
                            steps=steps_directory,
                            is_locked=is_locked,
                        )
                    )
            self._thread = background.pool(1, "step log")
            closing.callback(self._thread.shutdown)
            closing.push(self._end)
            self._closing = closing.pop_all()

    def emit(self, name: str, **fields: storage.Json) -> None:
        """Records an event, from any thread; give it to `ec.Checkpointer(emit=)`.

        A loop that reports `data_ended` is done.
        """
        if name == "save_started":
            self._sync()
        elif name == "saved":
            self._saved = int(str(fields["step"])) + 1 - self._record.first_step
        elif name == "world_claimed":
            self._claim = int(str(fields["world"]))
        elif name == "data_ended":
            self._wait()
            self._steps = self._done
        if self._journal is not None:
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
        """Logs one step; every process calls it alike, before it saves the step.

        It does not wait for the step to be computed: a thread writes its record while
        the next one runs.

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
        rows = _rows or step_log.digested(batch)
        self._show_pending()
        if self._done != step - 1:
            self._begin(step - 1)
            self.emit(
                "run_started",
                run=self._record.run,
                **dataclasses.asdict(self._world),
                start_step=step - 1,
                steps=self._steps,
            )
        now, since = time.monotonic(), self._since_secs
        self._done, self._since_secs = step, now
        if self._journal is None:
            metrics.TRAIN_STEPS.record(step)
        self._submit(self._write, step - 1, *rows, loss)
        self._pending = {
            "step": step,
            "steps": self._steps,
            "loss": loss,
            "secs": now - since,
            "tokens": tokens,
            "learning_rate": learning_rate,
            "gradient_norm": _gradient_norm,
        }
        if loss is not None:
            self._show_pending()
        self._wait(most=_MOST_LATE)

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
            self._pending |= {k: v for k, v in more.items() if v is not None}
            self._show_pending()

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
        # The journal notes why a run failed.
        self._closing.__exit__(kind, error, trace)

    def _begin(self, done: int, left_out: Ranges = ()) -> None:
        # Begins an attempt, whose first step is the one after `done`.
        self._show_pending()
        self._wait()
        self._done = done
        if self._saved > done:
            # Its steps are trained again.
            self._saved = 0
        self._submit(self._open, done, left_out)
        self._wait()

    def _end(self, *raised: Any) -> None:
        has_failed = raised != (None, None, None)
        # A step that was lost with its devices must not hide the error of the run.
        with contextlib.suppress(Exception) if has_failed else contextlib.nullcontext():
            self._show_pending()
            self._submit(self._close)
            self._wait()
        if has_failed or self._done is None:
            return
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

    def _submit(self, call: Callable[..., object], *arguments: object) -> None:
        if self._journal is not None:
            self._late.append(self._thread.submit(call, *arguments))

    def _wait(self, *, most: int = 0) -> None:
        while len(self._late) > most:
            late = self._late.popleft()
            background.wait([late])
            late.result()

    def _show_pending(self) -> None:
        told, self._pending = self._pending, None
        if told is not None:
            self._submit(self._show, told)

    def _sync(self) -> None:
        # Makes the records of all steps so far durable, from any thread.
        if self._journal is None:
            return
        synced = self._thread.submit(lambda: self._log.sync() if self._log else None)
        background.wait([synced])
        for late in self._late.copy():
            # A step that could not be written must not be saved.
            if late.done():
                late.result()
        why = synced.result()
        if why is not None:
            metrics.CHECKPOINT_FAILURES.record(1)
            advice = storage_cause.advice(why) or "bring the storage back"
            why = f"the step log is not written, and tried again: {why}; {advice}"
            storage_cause.report(self._journal, "persistent", self._done or 0, why)

    # In the thread of the log.

    def _open(self, done: int, left_out: Ranges) -> None:
        self._close()
        # Only now: a start that is refused must not replace the record of the run.
        run_files.write(self._directory, self._record)
        self._log = step_log.StepLog(
            *(self._directory, done),
            world=self._world,
            data=self._record.data or {},
            claim=self._claim,
            left_out=left_out,
        )

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _write(
        self,
        step: int,
        ids: jax.Array,
        digests: jax.Array,
        loss: float | jax.Array | None,
    ) -> None:
        assert self._log is not None
        self._log.write(step, ids, digests, None if loss is None else float(loss))

    def _show(self, told: dict[str, Any]) -> None:
        assert self._journal is not None
        numbers = jax.tree.map(lambda each: np.asarray(each).item(), told)
        norm = numbers.pop("gradient_norm")
        metrics.TRAIN_STEPS.record(numbers["step"])
        if norm is not None:
            metrics.TRAIN_GRADIENT_NORM.record(norm)
        self._journal("step", **numbers)


def _record(directory: str, chosen: Chosen) -> RunRecord:
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
