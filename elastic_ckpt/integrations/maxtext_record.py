"""The run directory of a MaxText run: what `status`, `report`, `scale`, `audit` read.

Beside MaxText's own files it has, as the runs of `elastic-ckpt train`, a record (of
those keys that have a meaning here), the events, the metrics of each host, and the
step log. Saved steps have MaxText's numbers, from 0; other steps in events say how many
are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from elastic_ckpt.core import errors, events, storage, topology
from elastic_ckpt.data import elastic_data
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import (
    batch_log,
    configured,
    journal,
    listeners,
    run_directory,
    schema,
)


class RunRecord:
    """Records a run on one of its hosts; used as a context.

    Args:
      config: of MaxText.
      metrics: the listeners of this host's.
      world: the topology of the run's devices.
      emit: shows the events; a supervisor, if there is one, keeps them.
      is_supervised: whether there is a supervisor, which keeps the events.
    """

    def __init__(
        self,
        config: Any,
        *,
        metrics: schema.MetricsSection,
        world: topology.Topology,
        emit: events.Emit,
        is_supervised: bool,
    ) -> None:
        self._directory = path_of(config)
        self._run_name = config.run_name
        self._world = world
        self._num_steps = self._ends_at = config.steps
        self._rows_per_device = config.per_device_batch_size
        # Of a global batch, now and at the start before; 0 if there was none.
        self._rows = self._rows_before = 0
        self._done = 0
        self._emit = emit
        self._closing = contextlib.ExitStack()
        self._log: batch_log.BatchLog | None = None
        # When the data was made, before the state is restored and the step compiled.
        self._made_secs = time.monotonic()
        self._closing.enter_context(listeners.running(self._directory, metrics))
        self._is_leader = topology.is_primary() and not is_supervised
        if self._is_leader:
            self._emit = self._closing.enter_context(
                journal.kept_in(
                    self._directory, emit, steps=run_directory.steps_of(self._directory)
                )
            )

    def emit(self, name: str, **fields: storage.Json) -> None:
        """Shows and keeps an event."""
        self._emit(name, **fields)

    def describe(self, config: schema.Config, *, rows: int) -> None:
        """Keeps the configuration, with which an audit reads the data again.

        Args:
          config: of the run.
          rows: of a global batch.
        """
        if topology.is_primary():
            with contextlib.suppress(errors.RunError):
                before = run_files.read(self._directory).data or {}
                self._rows_before = before["global_batch_size"]
            self._rows = rows
            data = dataclasses.replace(config.data, global_batch_size=rows)
            with_rows = dataclasses.replace(config, data=data)
            record = configured.record(with_rows, program="maxtext")
            run_files.write(self._directory, record)
        if self._log is not None:
            # Under Pathways MaxText begins again after an elastic event.
            self._log.close()
        self._made_secs = time.monotonic()
        self._log = batch_log.BatchLog(
            self._directory, world=self._world, data=dataclasses.asdict(config.data)
        )
        self._closing.callback(self._log.close)

    def begin(self, step: int) -> None:
        """Begins at a step, from 0, whose state is there."""
        if self._log is not None:
            self._log.begin(step)
        if topology.is_primary():
            self._emit(
                "run_started",
                run=self._run_name,
                **dataclasses.asdict(self._world),
                start_step=step,
                steps=self._num_steps,
            )
            if step and self._rows_before not in (0, self._rows):
                self._emit(
                    "batch_changed",
                    step=step,
                    rows=self._rows,
                    rows_before=self._rows_before,
                    per_device_before=self._rows_per_device
                    * self._rows_before
                    / self._rows,
                )

    def compiled(self, step: int) -> None:
        """Notes that the program of a step, from 1, is there."""
        if topology.is_primary():
            secs = time.monotonic() - self._made_secs
            self._emit("compiled", step=step, secs=secs)

    def take(self, batch: elastic_data.Batch) -> None:
        """Logs the batch of the next step; batches before `begin` are not trained."""
        if self._log is not None and self._log.next_step is not None:
            self._log.take(batch)

    def report(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Reports a step by the metrics of MaxText, which come a step later."""
        self._done = step + 1
        loss = float(scalars["learning/loss"])
        if self._log is not None:
            self._log.note_loss(step, loss)
        if topology.is_primary():
            self._emit(
                "step",
                # MaxText counts from 0.
                step=step + 1,
                steps=self._num_steps,
                loss=loss,
                secs=float(scalars["perf/step_time_seconds"]),
                tokens=int(scalars["learning/total_weights"]),
                learning_rate=float(scalars["learning/current_learning_rate"]),
            )

    def sync(self) -> None:
        """Writes the log of the steps so far, before the last of them is saved."""
        why = self._log.sync() if self._log is not None else None
        if why is not None:
            logging.warning("the step log is not written, and tried again: %s", why)

    def data_ended(self, num_steps: int) -> None:
        """Notes that the data has ended after a number of steps."""
        self._done = self._ends_at = num_steps
        if topology.is_primary():
            self._emit("data_ended", step=num_steps)

    def close(self, *, secs: float) -> None:
        """Notes the end of a run that has not failed."""
        if self._is_leader and self._done:
            if self._done == self._ends_at:
                self._emit("run_finished", step=self._done, secs=secs)
            else:
                self._emit("run_stopped", step=self._done, saved=True)
        self._closing.close()

    def abandon(self, error: BaseException) -> None:
        """Notes why a run has failed."""
        # The journal raises it once more.
        with contextlib.suppress(BaseException):
            self._closing.__exit__(type(error), error, error.__traceback__)


def path_of(config: Any) -> str:
    """The directory of a run of MaxText."""
    return os.path.join(config.base_output_directory, config.run_name)
