"""Worker processes: each runs some of a host's shards and sends rows over a pipe.

A process receives its task, pickled by cloudpickle, on its standard input and never
imports the program's main module, so a script needs no `if __name__ == "__main__":`.
Its standard output is the pipe; user code prints to standard error. Arrays are read
from the pipe straight into their memory, without the interpreter lock.

A process exits immediately when its standard input closes, so none outlives a killed
host. Neither pipes nor processes have names that could be left behind.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import functools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing import process
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from elastic_ckpt.core import errors

if TYPE_CHECKING:
    # The import takes seconds, and a worker must notice its host's death during it.
    from elastic_ckpt.data import shard_rows

# A larger pipe than the default wakes the reader less often.
_PIPE_BYTES = 1 << 20


class Workers:
    """Combines the rows of n worker processes that each run every n-th shard.

    Args:
      task: the shards and rows to read.
      num_workers: n.
      num_ahead: the number of batches that each worker prepares in advance.

    Raises:
      ConfigError: if the task cannot be sent to another process.
    """

    def __init__(
        self, task: shard_rows.Task, *, num_workers: int, num_ahead: int
    ) -> None:
        self._task = task
        self._number = task.number + task.first
        shards = sorted(task.start)
        self._shares = [shards[number::num_workers] for number in range(num_workers)]
        self._workers = [
            _Worker(
                f"worker process {number} of {num_workers}",
                dataclasses.replace(task, start={s: task.start[s] for s in share}),
                num_ahead=num_ahead,
            )
            for number, share in enumerate(self._shares)
        ]

    def __next__(self) -> shard_rows.Loaded:
        shards, keep = self._task.row_shards(self._number)
        self._number += self._task.every
        loaded = [next(worker) for worker in self._workers]
        of_workers = [each.rows for each in loaded if each.rows is not None]
        rows = of_workers[0]
        if len(of_workers) > 1:
            of_share = [np.isin(shards[keep], share) for share in self._shares]
            order = np.argsort(np.concatenate([*map(np.flatnonzero, of_share)]))
            rows = {
                name: np.concatenate([each[name] for each in of_workers])[order]
                for name in rows
            }
        noted = {s: cursor for each in loaded for s, cursor in each.cursors.items()}
        return dataclasses.replace(loaded[0], rows=rows, cursors=noted)

    def close(self) -> None:
        """Stops the processes."""
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self, name: str, task: shard_rows.Task, *, num_ahead: int) -> None:
        self._name = name
        content = _pickled(task)
        paths = [path for path in sys.path if isinstance(path, str)]
        begin = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The devices belong to the host's own process.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        pipes: Any = self._process.stdin, self._process.stdout
        given, self._batches = pipes
        with contextlib.suppress(AttributeError, OSError):
            fcntl.fcntl(self._batches, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # If the process has already exited, the first read raises the error.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((num_ahead, content), given)
            given.flush()

    def __next__(self) -> shard_rows.Loaded:
        try:
            loaded, error = cloudpickle.load(self._batches)
        except (EOFError, pickle.UnpicklingError):
            raise self._dead() from None
        if error is None:
            return loaded
        error.add_note(f"in {self._name}")
        raise error

    def _dead(self) -> errors.DataError:
        # The pipe closes a moment before the process exits.
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return errors.DataError(
            f"{self._name} (process {self._process.pid}) stopped with {how}; its"
            " standard error may show the cause. The kernel sends SIGKILL when memory"
            " runs out; in that case, use fewer workers, smaller batches or shuffle"
            " buffers, or a host with more memory"
        )

    def close(self) -> None:
        # Unsent data for a process that has exited does not matter.
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.kill()


def _pickled(task: shard_rows.Task) -> bytes:
    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        # A user's objects may raise anything.
        raise errors.ConfigError(
            "make_shard cannot be sent to worker processes:"
            f" {type(error).__name__}: {error}; create objects that cannot be pickled,"
            " such as open files, locks and devices, only when make_shard is called, or"
            " run shards in the host's own process (num_workers=0, or"
            " grain_worker_count=0 in a configuration)"
        ) from error


def main() -> None:
    """Runs the task from standard input, sending batches until that input closes."""
    # The host stops its workers itself when it is interrupted or terminated.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # So that a pipeline cannot start processes, which nobody would stop.
    process.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    # User code must neither read what the host sends nor print into the pipe.
    given, pipe = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A process that user code forks must not keep a killed worker's pipe open.
    os.register_at_fork(after_in_child=functools.partial(os.close, pipe.fileno()))
    num_ahead, content = cloudpickle.load(given)
    threading.Thread(target=_end_with, args=(given,), daemon=True).start()
    ahead: queue.Queue[Any] = queue.Queue(num_ahead)
    threading.Thread(target=_send_all, args=(pipe, ahead), daemon=True).start()
    try:
        from elastic_ckpt.data import shard_rows

        read = shard_rows.ShardRows(cloudpickle.loads(content))
        while True:
            ahead.put((next(read), None))
    except BaseException as error:  # raised again in the host
        error.add_note(traceback.format_exc())
        ahead.put((None, error))
    threading.Event().wait()


def _send_all(pipe: IO[bytes], ahead: queue.Queue[Any]) -> None:
    # Sends until the host is gone.
    with contextlib.suppress(OSError):
        while True:
            pipe.write(_content(*ahead.get()))
            pipe.flush()


def _content(loaded: Any, error: BaseException | None) -> bytes:
    try:
        # Some errors can be pickled but not unpickled; copying shows that here.
        copy.copy(error)
        return cloudpickle.dumps((loaded, error))
    except Exception as failure:  # a user's objects may raise anything
        what = error or failure
        failed = errors.DataError(
            f"a pipeline yielded or raised an object that cannot be pickled: {what!r};"
            " use only objects that can be pickled, or run shards in the host's own"
            " process (num_workers=0, or grain_worker_count=0 in a configuration)"
        )
        failed.add_note("".join(traceback.format_exception(what)))
        return cloudpickle.dumps((None, failed))


def _end_with(given: IO[bytes]) -> None:
    while given.read(1):
        pass
    os._exit(1)
