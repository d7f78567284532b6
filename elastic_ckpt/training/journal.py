"""The journal of a run: its events, shown to people and kept in `events.jsonl`.

The leader of a run (the supervisor, or the first host under another launcher) keeps it,
together with the run's lock, and adds how the run ended. An event carries the number of
the world that this start of the run has claimed last (`claim`), so that readers ignore
those of a start that another one has replaced.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from absl import logging

from elastic_ckpt.core import (
    bucket_clients,
    errors,
    events,
    jsonlog,
    storage,
    storage_cause,
)
from elastic_ckpt.inspect import run_files
from elastic_ckpt.training import run_directory, schema

_MAX_REASON = 500
# Between two writes of a log in an object store.
_SYNC_SECS = 10.0


class Journal:
    """An `Emit` that passes events on and keeps all but the steps, which have a log.

    Args:
      emit: shows the events.
      log: of the run.
      directory: of the run.
      claims_at: the directory of the run's steps, where its worlds are claimed.
      claim: the world that was claimed last when this start began; 0 if there is none,
        or no other start can be there.

    Attributes:
      is_stopped: whether the run ended because it was asked to.
    """

    def __init__(
        self,
        emit: events.Emit,
        log: jsonlog.JsonLog,
        directory: str,
        *,
        claims_at: str,
        claim: int = 0,
    ) -> None:
        self._emit = emit
        self._log = log
        self._directory = directory
        self._claims_at = claims_at
        # The number of the world that was claimed last; none before the first.
        self._claim: dict[str, storage.Json] = {"claim": claim} if claim else {}
        # Until this start has claimed a world, the newest one may be its own.
        self._has_claimed = False
        self._lock = threading.Lock()
        self._has_begun = False
        self._step = 0
        # Whether the newest step is in no save that this start knows of.
        self._is_unsaved = True
        self._is_changed = False
        self.is_stopped = False

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows and keeps one event; from any thread."""
        with self._lock:
            self._emit(name, **fields)
            self._has_begun = True
            if name == "run_started":
                self._step = int(str(fields["start_step"]))
            elif name in ("step", "step_done"):
                self._step = int(str(fields["step"]))
                self._is_unsaved = True
            elif name in ("restored_from", "world_left"):
                # All hosts save before they leave.
                self._step = int(str(fields["step"]))
                self._is_unsaved = False
            elif name == "run_stopped":
                self.is_stopped = True
            elif name == "world_claimed":
                self._claim = {"claim": fields["world"]}
                self._has_claimed = True
            if name not in ("step", "step_done"):
                line = {"time": time.time(), "event": name, **fields, **self._claim}
                self._log.append(line)
                self._is_changed = True

    def sync(self) -> None:
        """Writes the events so far, unless they are written; a failure is logged."""
        if not self._is_changed:
            return
        self._is_changed = False
        try:
            if not self._is_replaced():
                self._log.sync()
        except (errors.CheckpointError, *bucket_clients.failures()) as error:
            self._is_changed = True
            logging.warning("the run's events cannot be written now: %s", error)

    def check(self) -> None:
        """Raises a RunError if the log was removed while it was written."""
        self._log.check()

    def close(self) -> None:
        """Writes what is left, and closes the log; a failure is logged.

        The run's result is known, and an error of it must not be hidden.
        """
        self.sync()
        if storage.is_local(self._directory):
            with contextlib.suppress(OSError):
                self._log.close()

    def _is_replaced(self) -> bool:
        # Whether another start writes the log. On a disk its lines follow those of the
        # other one; segments have no such order.
        from elastic_ckpt.tiers.persistent import claims

        claim = self._claim.get("claim")
        is_known = self._has_claimed and isinstance(claim, int)
        if storage.is_local(self._directory) or not is_known:
            return False
        return claims.is_replaced(self._claims_at, claim)

    def stopped_early(self) -> None:
        """Keeps that the run ended where it was, perhaps before a save."""
        if self._has_begun:
            self("run_stopped", step=self._step, saved=not self._is_unsaved)

    def failed(self, error: Exception) -> None:
        """Keeps why a run failed; one that was refused had no event yet."""
        if self._has_begun:
            why = str(error).partition("\n")[0] or type(error).__name__
            self("run_failed", step=self._step, why=why[:_MAX_REASON])


@contextlib.contextmanager
def kept(
    config: schema.Config,
    emit: events.Emit,
    *,
    listening: contextlib.AbstractContextManager[None] | None = None,
    is_locked: bool = True,
) -> Iterator[Journal]:
    """The journal of the run of `config`; see `kept_in`."""
    directory = run_directory.path_of(config)
    with kept_in(
        directory,
        emit,
        steps=run_directory.steps_of(directory),
        listening=listening,
        is_locked=is_locked,
    ) as journal:
        yield journal


@contextlib.contextmanager
def kept_in(
    directory: str,
    emit: events.Emit,
    *,
    steps: str,
    listening: contextlib.AbstractContextManager[None] | None = None,
    is_locked: bool = True,
) -> Iterator[Journal]:
    """The journal of the run in `directory`, which belongs to this process meanwhile.

    Args:
      directory: of the run.
      emit: shows the events.
      steps: the directory of its steps, where its worlds are claimed.
      listening: the listeners of the run's metrics, unless this process has others.
      is_locked: whether to lock the run; otherwise the claims of its worlds decide
        between several processes.

    Raises:
      RunError: if another live process is writing the run.
      ConfigError: if this account may not write there.
      CheckpointError: if it is not locked, and its claims cannot be read.
    """
    from elastic_ckpt.monitoring import goodput

    if not storage.is_local(directory):
        _check_writable(directory)
    lock = os.path.join(directory, run_files.LOCK)
    with storage.exclusive_lock(lock) if is_locked else contextlib.nullcontext():
        log = jsonlog.writer(os.path.join(directory, run_files.EVENTS))
        with listening or contextlib.nullcontext(), contextlib.ExitStack() as closing:
            measured = goodput.RunMetrics(emit, newest_step=_newest_step(directory))
            claim = 0 if is_locked else _newest_claim(steps)
            journal = Journal(measured, log, directory, claims_at=steps, claim=claim)
            closing.callback(journal.close)
            try:
                with _synced(journal, is_needed=not storage.is_local(directory)):
                    yield journal
                journal.check()
            except (errors.StoppedError, KeyboardInterrupt, SystemExit):
                journal.stopped_early()
                raise
            except Exception as error:
                journal.failed(error)
                raise


def _check_writable(directory: str) -> None:
    # A launcher would start a run that may not write again and again. Whatever may pass
    # does not count.
    path = storage.absolute(directory) / f"{run_files.EVENTS}.probe"
    try:
        storage.write_atomic(path, b"{}\n")
        storage.remove(path)
    except bucket_clients.failures() as error:
        told = storage_cause.explained(error, directory)
        if isinstance(told, errors.ConfigError):
            raise told from None


@contextlib.contextmanager
def _synced(journal: Journal, *, is_needed: bool) -> Iterator[None]:
    # Writes the log of a run in an object store, where people look at it, at intervals.
    is_closing = threading.Event()

    def sync() -> None:
        while not is_closing.wait(_SYNC_SECS):
            journal.sync()

    if not is_needed:
        yield
        return
    thread = threading.Thread(target=sync, name="events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_closing.set()
        thread.join()


def _newest_claim(steps: str) -> int:
    from elastic_ckpt.tiers.persistent import claims

    newest = claims.newest(steps)
    return 0 if newest is None else newest.number


def _newest_step(directory: str) -> int:
    # The most steps that earlier starts have done, by their metrics.
    from elastic_ckpt.core import metrics

    try:
        files = run_files.read_metrics(os.path.join(directory, run_files.METRICS))
    except errors.DataError as error:
        logging.warning("steps trained again may count as goodput: %s", error)
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
