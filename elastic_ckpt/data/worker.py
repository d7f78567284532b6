"""Worker processes: each runs some shards of a host, and sends their rows by a pipe.

A process receives its task through its standard input, by cloudpickle, and never
imports the program's main module, so that a script needs no
`if __name__ == "__main__":`. Arrays are read from the pipe straight into their memory,
without the interpreter lock.

A process ends at once when its standard input closes, so that none outlives a host that
is killed. Neither pipes nor processes have a name that could be left behind.
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
import weakref
from multiprocessing import process
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from elastic_ckpt.core import errors

if TYPE_CHECKING:
    # It takes seconds to import, and a worker has to listen to its host meanwhile.
    from elastic_ckpt.data import shard_rows

# A larger pipe than usual wakes the reader less often.
_PIPE_BYTES = 1 << 20


class Workers:
    """Worker processes that each run every n-th shard; combines their rows.

    Args:
      task: what they read together.
      num_workers: n.
      num_ahead: batches that each prepares in advance.

    Raises:
      ConfigError: if the task cannot be sent to another process.
    """

    def __init__(
        self, task: shard_rows.Task, *, num_workers: int, num_ahead: int
    ) -> None:
        self._task = task
        self._number = task.number + task.first
        self._workers: list[tuple[list[int], _Worker]] = []
        for number in range(num_workers):
            share = sorted(task.start)[number::num_workers]
            start = {shard: task.start[shard] for shard in share}
            worker = _Worker(
                f"worker process {number} of {num_workers}",
                dataclasses.replace(task, start=start),
                num_ahead=num_ahead,
            )
            self._workers.append((share, worker))

    def __next__(self) -> shard_rows.Loaded:
        shards, keep = self._task.row_shards(self._number)
        self._number += self._task.every
        of_workers = [(share, next(worker)) for share, worker in self._workers]
        places = [
            np.flatnonzero(np.isin(shards[keep], share))
            for share, loaded in of_workers
            if loaded.rows is not None
        ]
        parts = [each.rows for _, each in of_workers if each.rows is not None]
        rows = parts[0]
        if len(parts) > 1:
            order = np.argsort(np.concatenate(places))
            rows = {
                name: np.concatenate([part[name] for part in parts])[order]
                for name in rows
            }
        noted = {
            shard: cursor
            for _, each in of_workers
            for shard, cursor in each.cursors.items()
        }
        return dataclasses.replace(of_workers[0][1], rows=rows, cursors=noted)

    def close(self) -> None:
        """Ends the processes."""
        for _, worker in self._workers:
            worker.close()


class _Worker:
    """A process that runs some shards of a task."""

    def __init__(self, name: str, task: shard_rows.Task, *, num_ahead: int) -> None:
        content = _pickled(task)
        reading, writing = os.pipe()
        self._batches = os.fdopen(reading, "rb")
        with contextlib.suppress(AttributeError, OSError):
            fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(), str(writing)],
                stdin=subprocess.PIPE,
                pass_fds=[writing],
                # The devices are those of the host's own process.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        finally:
            os.close(writing)
        self._name = name
        given = self._process.stdin
        assert given is not None
        self.close = weakref.finalize(self, _end, self._process, given, self._batches)
        # A process that has ended already is an error when it is read.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((num_ahead, content), given)
            given.flush()

    def __next__(self) -> shard_rows.Loaded:
        try:
            loaded, error, where = cloudpickle.load(self._batches)
        except (EOFError, pickle.UnpicklingError):
            raise self._dead() from None
        if error is None:
            return loaded
        # The messages of ours are sufficient.
        ours = isinstance(error, errors.ElasticCkptError)
        error.add_note(f"in {self._name}" if ours else f"in {self._name}:\n{where}")
        raise error

    def _dead(self) -> errors.DataError:
        # It closes its pipe a moment before it is gone.
        code = self._process.wait()
        how = f"ended with exit status {code}; its standard error has the cause"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += (
                ", as the kernel does when memory is short: use fewer workers, smaller"
                " batches or shuffle buffers, or give the host more memory"
            )
        return errors.DataError(f"{self._name} (process {self._process.pid}) {how}")


def _pickled(task: shard_rows.Task) -> bytes:
    try:
        return cloudpickle.dumps(task)
    except Exception as error:
        # Whatever the objects of a user raise.
        raise errors.ConfigError(
            "make_shard cannot be sent to worker processes:"
            f" {type(error).__name__}: {error}; have it make what cannot be pickled,"
            " such as open files, locks and devices, when it is called, or read in the"
            " host's own process (num_workers=0, grain_worker_count=0)"
        ) from error


def _program() -> str:
    paths = [path for path in sys.path if isinstance(path, str)]
    return (
        f"import sys; sys.path[:] = {paths!r};"
        f" from {__name__} import main; main(int(sys.argv[1]))"
    )


def _end(worker: subprocess.Popen[bytes], *pipes: IO[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in pipes:
        # What was not sent to a process that had ended stays unsent.
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def main(writing: int) -> None:
    """Sends the batches of the task in the standard input, until that closes."""
    # A host that is interrupted, or has to leave, ends its workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Else a pipeline could start processes that nobody ends.
    process.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A process that a pipeline forks by hand would hold the pipe of one that is killed.
    os.register_at_fork(after_in_child=functools.partial(os.close, writing))
    # Code of the user must not take what the host sends.
    given = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    num_ahead, content = cloudpickle.load(given)
    threading.Thread(target=_end_with, args=(given,), daemon=True).start()
    ahead: queue.Queue[Any] = queue.Queue(num_ahead)
    threading.Thread(target=_send_all, args=(writing, ahead), daemon=True).start()
    try:
        from elastic_ckpt.data import shard_rows

        read = shard_rows.ShardRows(cloudpickle.loads(content))
        while True:
            ahead.put((next(read), None, ""))
    except BaseException as error:  # the host raises it again
        ahead.put((None, error, traceback.format_exc()))
    threading.Event().wait()


def _send_all(writing: int, ahead: queue.Queue[Any]) -> None:
    try:
        with os.fdopen(writing, "wb") as pipe:
            while True:
                pipe.write(_content(*ahead.get()))
                pipe.flush()
    except OSError:
        os._exit(1)  # the host is gone


def _content(loaded: Any, error: BaseException | None, where: str) -> bytes:
    try:
        # Some that can be pickled cannot be made again, there as little as here.
        copy.copy(error)
        return cloudpickle.dumps((loaded, error, where))
    except Exception as failure:  # whatever objects of a user raise
        what = error or failure
        failed = errors.DataError(
            f"a pipeline yields, or raises, what cannot be pickled: {what!r}"
        )
        return cloudpickle.dumps((None, failed, where))


def _end_with(given: IO[bytes]) -> None:
    while given.read(1):
        pass
    os._exit(1)
