"""The journal of a run: its events, shown to people and kept in `events.jsonl`.

The leader of a run (the supervisor, or the first host under another launcher) keeps it,
together with the run's lock, and adds how the run ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from elastic_ckpt.application import run_directory
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage

_MAX_REASON = 500


class Journal:
    """An `Emit` that passes events on and keeps all but the steps, which have a log.

    Args:
      emit: shows the events.
      log: of the run.

    Attributes:
      is_stopped: whether the run ended because it was asked to.
    """

    def __init__(self, emit: events.Emit, log: storage.AppendLog) -> None:
        self._emit = emit
        self._log = log
        self._lock = threading.Lock()
        self._has_begun = False
        self._step = 0
        self.is_stopped = False

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Shows and keeps one event; from any thread."""
        with self._lock:
            self._emit(name, **fields)
            self._has_begun = True
            if name == "run_started":
                self._step = int(str(fields["start_step"]))
            elif name == "step":
                self._step = int(str(fields["step"]))
            elif name == "run_stopped":
                self.is_stopped = True
            if name != "step":
                self._log.append({"time": time.time(), "event": name, **fields})

    def stopped_without_a_save(self) -> None:
        """Keeps that the run ended before the state of its last step was saved."""
        if self._has_begun:
            self("run_stopped", step=self._step, saved=False)

    def failed(self, error: Exception) -> None:
        """Keeps why a run failed; one that was refused had no event yet."""
        if self._has_begun:
            why = str(error).partition("\n")[0] or type(error).__name__
            self("run_failed", step=self._step, why=why[:_MAX_REASON])


@contextlib.contextmanager
def kept(config: schema.Config, emit: events.Emit) -> Iterator[Journal]:
    """The journal of the run of `config`, which belongs to this process meanwhile.

    Raises:
      RunError: if another live process is writing the run.
    """
    directory = run_directory.path_of(config)
    with storage.exclusive_lock(os.path.join(directory, run_directory.LOCK)):
        log = storage.AppendLog(os.path.join(directory, run_directory.EVENTS))
        with contextlib.closing(log):
            journal = Journal(emit, log)
            try:
                yield journal
            except (errors.StoppedError, KeyboardInterrupt, SystemExit):
                journal.stopped_without_a_save()
                raise
            except Exception as error:
                journal.failed(error)
                raise
