"""The run directory: its paths, the run's events, and its processes' metrics.

The leader of a run (the supervisor, or the first host under a different launcher) holds
the run's lock and logs the run's events and outcome in `events.jsonl`. Each event
carries the number of the last world that this launch of the run claimed (`claim`), so
that readers can ignore events of a replaced launch.

Each process writes its metrics as JSON lines and serves them as configured. The readers
are in `inspect.run_files`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator

from absl import logging
from etils import epy

from elastic_ckpt.core import (
    bucket_clients,
    errors,
    events,
    jsonlog,
    storage,
    storage_cause,
)
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.training import load, schema

with epy.lazy_imports():
    from elastic_ckpt.core import metrics, topology
    from elastic_ckpt.elastic import process_cluster
    from elastic_ckpt.monitoring import goodput, prometheus, summaries, tensorboard
    from elastic_ckpt.tiers.persistent import claims

_MAX_REASON = 500
# Events that report how many steps are completed.
_OF_STEPS = ("run_started", "step", "step_done", "restored_from", "world_left")
# The longest delay before an event appears in a log in an object store.
_SYNC_SECS = 10.0


def path_of(config: schema.Config) -> str:
    """The run directory that `config` describes."""
    return os.path.join(config.run.base_output_directory, config.run.run_name)


def logs_of(config: schema.Config) -> str:
    """The directory for the output of this machine's hosts.

    Object stores cannot append to files, so the logs of a run in a bucket go to a new
    temporary directory on this machine.
    """
    directory = path_of(config)
    if storage.is_local(directory):
        return os.path.join(directory, run_files.LOGS)
    return tempfile.mkdtemp(prefix=f"{config.run.run_name}-{run_files.LOGS}-")


def steps_of(directory: str) -> str:
    """The directory with a run's steps in persistent storage."""
    return os.path.join(directory, layout.STEPS)


def read_config(directory: str) -> schema.Config:
    """The configuration with which the run in `directory` was last launched.

    Raises:
      RunError: if there is no run in `directory`.
      ConfigError: if the configuration is not valid in this version of elastic_ckpt.
    """
    settings = run_files.read(directory).settings
    return load.from_values(settings, place=os.path.join(directory, run_files.RECORD))


class Journal:
    """An `Emit` that forwards every event and logs all except step events.

    Step events go to the step log.

    Args:
      emit: called with each event.
      directory: the run directory.
      steps: the directory with the run's steps and its world claims.
      claim: the number of the last world claimed before this launch; 0 if there is
        none, or if no other launch can be alive.
      first_step: the number under which the run's first step is saved.

    Attributes:
      is_stopped: whether the run stopped because it was asked to.
    """

    def __init__(
        self,
        emit: events.Emit,
        directory: str,
        *,
        steps: str,
        claim: int,
        first_step: int = 1,
    ) -> None:
        self._emit = emit
        self._log = jsonlog.writer(os.path.join(directory, run_files.EVENTS))
        self._is_local = storage.is_local(directory)
        self._steps, self._first_step = steps, first_step
        # The last claimed world, and whether this launch claimed it: until then, the
        # latest world in storage may belong to this launch.
        self._claim, self._has_claimed = claim, False
        self._lock = threading.Lock()
        # The number of completed steps, and the step of the newest save or restore.
        self._step, self._saved = 0, -1
        self._has_begun = self.is_stopped = False
        self._is_closed = threading.Event()
        if not self._is_local:
            threading.Thread(target=self._sync_late, daemon=True).start()

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows and logs an event; any thread may call this method."""
        with self._lock:
            self._emit(name, **fields)
            self._has_begun = True
            if name in _OF_STEPS:
                self._step = int(str(fields.get("start_step", fields.get("step"))))
            if name in ("saved", "restored_from"):
                self._saved = int(str(fields["step"])) + 1 - self._first_step
            elif name == "world_left":
                # All hosts save before they leave.
                self._saved = self._step
            elif name == "run_stopped":
                self.is_stopped = True
            elif name == "world_claimed":
                self._claim, self._has_claimed = int(str(fields["world"])), True
            if name not in ("step", "step_done"):
                claim = {"claim": self._claim} if self._claim else {}
                self._log.append(
                    {"time": time.time(), "event": name, **fields, **claim}
                )

    def sync(self) -> None:
        """Writes pending events; logs a failure."""
        if not self._log.late_bytes:
            return
        try:
            # Unlike lines in a file, segments from two launches have no order.
            is_ours = self._is_local or not self._has_claimed
            if is_ours or not claims.is_replaced(self._steps, self._claim):
                self._log.sync()
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            logging.warning("the run's events cannot be written now: %s", error)

    def _sync_late(self) -> None:
        while not self._is_closed.wait(_SYNC_SECS):
            self.sync()

    def close(self) -> None:
        """Writes pending events and closes the log.

        Only logs a failure, which must not hide an error of the run.
        """
        self._is_closed.set()
        self.sync()
        if self._is_local:
            with contextlib.suppress(OSError):
                self._log.close()

    def stopped_early(self) -> None:
        """Logs that the run stopped early, perhaps before a save.

        Writes immediately: the process may exit without closing the journal.
        """
        if self._has_begun:
            self("run_stopped", step=self._step, saved=self._saved >= self._step)
            self.sync()


@contextlib.contextmanager
def kept(
    directory: str,
    emit: events.Emit,
    *,
    steps: str | None = None,
    first_step: int = 1,
    listeners: contextlib.AbstractContextManager[None] | None = None,
    is_locked: bool = True,
) -> Iterator[Journal]:
    """Opens the journal of the run in `directory`.

    This process owns the run while the block runs.

    Args:
      directory: the run directory.
      emit: called with each event.
      steps: the directory with the run's steps and its world claims; by default the one
        in `directory`.
      first_step: the number under which the run's first step is saved.
      listeners: a context manager that exports metrics while the journal is open.
      is_locked: whether to lock the run; if not, world claims decide which process
        may write.

    Raises:
      RunError: if another live process is writing to the run, or the log was removed.
      ConfigError: if this account has no write permission there.
      CheckpointError: if the run is not locked and its claims cannot be read.
    """
    if not storage.is_local(directory):
        _check_writable(directory)
    with contextlib.ExitStack() as closing:
        if is_locked:
            lock = os.path.join(directory, run_files.LOCK)
            closing.enter_context(storage.exclusive_lock(lock))
        if listeners:
            closing.enter_context(listeners)
        measured = goodput.RunMetrics(emit, newest_step=_newest_step(directory))
        steps = steps or steps_of(directory)
        newest = None if is_locked else claims.newest(steps)
        claim = 0 if newest is None else newest.number
        journal = Journal(
            measured, directory, steps=steps, claim=claim, first_step=first_step
        )
        closing.callback(journal.close)
        try:
            yield journal
            journal._log.check()
        except process_cluster.LeadershipLostError:
            # Another machine continues the run.
            raise
        except (errors.StoppedError, KeyboardInterrupt, SystemExit):
            journal.stopped_early()
            raise
        except Exception as error:
            # A rejected launch has not emitted any events.
            if journal._has_begun:
                why = str(error).partition("\n")[0] or type(error).__name__
                journal("run_failed", step=journal._step, why=why[:_MAX_REASON])
            raise


def _check_writable(directory: str) -> None:
    # Otherwise a launcher would restart a run without write permission forever. Ignores
    # errors that may be temporary.
    path = storage.absolute(directory) / f"{run_files.EVENTS}.probe"
    try:
        storage.write_atomic(path, b"{}\n")
        storage.remove(path)
    except bucket_clients.failures() as error:
        told = storage_cause.explained(error, directory)
        if isinstance(told, errors.ConfigError):
            raise told from None


def _newest_step(directory: str) -> int:
    # The highest step that earlier launches reached, according to their metrics.
    try:
        files = run_files.read_metrics(os.path.join(directory, run_files.METRICS))
    except errors.DataError as error:
        logging.warning("retrained steps may count as goodput: %s", error)
        return 0
    return max(
        (
            int(line["max"])
            for lines in files.values()
            for line in lines
            if line["metric"] == metrics.TRAIN_STEPS.name
        ),
        default=0,
    )


def listening_on_machine(
    config: schema.Config, *, host: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """`listening` for one of a machine's processes, each with its own port.

    All machines use the same ports, because a machine's hosts have consecutive indices.
    `host` is the host's index in its world, or None for the supervisor, whose port
    follows the hosts' ports.
    """
    section = config.metrics
    if section.prometheus_port:
        on_machine = config.world.hosts // config.elastic.elastic_machines
        place = on_machine if host is None else host % on_machine
        section = dataclasses.replace(
            section, prometheus_port=section.prometheus_port + place
        )
    return listening(path_of(config), section, name="run" if host is None else None)


@contextlib.contextmanager
def listening(
    directory: str, section: schema.MetricsSection, *, name: str | None = None
) -> Iterator[None]:
    """Exports this process's metrics while the block runs, as configured.

    By default, files are named after this host.

    Raises:
      ConfigError: if a package that a listener needs is not installed, or Prometheus
        cannot be served.
    """
    name = name or f"host-{topology.this_host():05d}"
    lines = os.path.join(directory, run_files.METRICS, f"{name}.jsonl")
    with contextlib.ExitStack() as running:
        if section.prometheus_port:
            running.enter_context(
                prometheus.serving(
                    port=section.prometheus_port,
                    interface=section.prometheus_interface,
                )
            )
        if section.enable_tensorboard:
            tensorboard.library()
            board = os.path.join(directory, run_files.TENSORBOARD, name)
            running.enter_context(
                summaries.listening(tensorboard.event_file(board), name=board)
            )
        running.enter_context(
            summaries.listening(summaries.json_lines(lines), name=lines)
        )
        yield
