"""A worker process: reads a share of a host's rows, and sends them through a pipe.

It receives its task through its standard input, by cloudpickle, and never imports the
program's main module, so that a script needs no `if __name__ == "__main__":`. Arrays
are read from the pipe straight into their memory, without the interpreter lock.

A process ends at once when its standard input closes, so that none outlives a host that
is killed. Neither pipes nor processes have a name that could be left behind.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import process
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from elastic_ckpt.core import errors

if TYPE_CHECKING:
    # It takes seconds to import, and a worker has to listen to its host meanwhile.
    from elastic_ckpt.data import shard_rows

# How often a process that sends nothing is checked for being alive. One that dies
# closes its pipe, unless a process that it has forked holds it, too.
_CHECK_MILLIS = 200
# A larger pipe than usual wakes the reader less often.
_PIPE_BYTES = 1 << 20
_NUMBER = struct.Struct("<Q")

_Fill = Callable[[memoryview], None]


class WorkerProcess:
    """A process that runs some shards of a task.

    Args:
      name: of the process, for errors.
      task: what it reads.
      num_ahead: batches that it prepares in advance.

    Raises:
      ConfigError: if the task cannot be sent to another process.
    """

    def __init__(self, name: str, task: shard_rows.Task, *, num_ahead: int) -> None:
        content = _pickled(task)
        reading, writing = os.pipe()
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
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._name = name
        self._reading = reading
        self._poll = select.poll()
        self._poll.register(reading, select.POLLIN)
        assert self._process.stdin is not None
        self.close = weakref.finalize(
            self, _end, self._process, self._process.stdin, reading
        )
        # A process that has ended already is an error when it is read.
        with contextlib.suppress(BrokenPipeError):
            _send(self._process.stdin.fileno(), (num_ahead, content))

    def __next__(self) -> shard_rows.Loaded:
        loaded, error, where = _receive(self._fill)
        if error is None:
            return loaded
        # The messages of ours are sufficient.
        ours = isinstance(error, errors.ElasticCkptError)
        error.add_note(f"in {self._name}" if ours else f"in {self._name}:\n{where}")
        raise error

    def _fill(self, memory: memoryview) -> None:
        while memory:
            if not self._poll.poll(_CHECK_MILLIS):
                if self._process.poll() is None:
                    continue
                if not self._poll.poll(0):
                    raise self._dead()
            if not (num_read := os.readv(self._reading, [memory])):
                raise self._dead()
            memory = memory[num_read:]

    def _dead(self) -> errors.DataError:
        # It closes its pipe a moment before it is gone.
        code = self._process.wait()
        how = f"ended with exit status {code}; its standard error has the cause"
        if code < 0:
            how = f"was killed by {_signal_name(-code)}"
        if code == -signal.SIGKILL:
            how += (
                ", as the kernel does when memory is short: use fewer workers, smaller"
                " batches or shuffle buffers, or give the host more memory"
            )
        return errors.DataError(f"{self._name} (process {self._process.pid}) {how}")


def _pickled(task: shard_rows.Task) -> bytes:
    try:
        return cloudpickle.dumps(task, protocol=5)
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


def _end(worker: subprocess.Popen[bytes], given: IO[bytes], reading: int) -> None:
    worker.kill()
    worker.wait()
    given.close()
    os.close(reading)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _send(pipe: int, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(content), *(buffer.raw() for buffer in buffers)]
    head = [_NUMBER.pack(number) for number in (len(parts), *(p.nbytes for p in parts))]
    for part in (memoryview(b"".join(head)), *parts):
        while part:
            part = part[os.write(pipe, part) :]


def _receive(fill: _Fill) -> Any:
    def numbers(count: int) -> Sequence[int]:
        memory = bytearray(_NUMBER.size * count)
        fill(memoryview(memory))
        return [number for (number,) in _NUMBER.iter_unpack(memory)]

    (num_parts,) = numbers(1)
    parts = [bytearray(size) for size in numbers(num_parts)]
    for part in parts:
        fill(memoryview(part))
    return cloudpickle.loads(parts[0], buffers=parts[1:])


def main(writing: int) -> None:
    """Sends the batches of the task in the standard input, until that closes."""
    # A host that is interrupted, or has to leave, ends its workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Else a pipeline could start processes that nobody ends.
    process.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Code of the user must not take what the host sends.
    given = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    num_ahead, content = _receive(lambda memory: _fill_from(given, memory))
    threading.Thread(target=_end_with, args=(given,), daemon=True).start()
    loaded: queue.Queue[Any] = queue.Queue(num_ahead)
    threading.Thread(target=_send_all, args=(writing, loaded), daemon=True).start()
    try:
        from elastic_ckpt.data import shard_rows

        read = shard_rows.ShardRows(cloudpickle.loads(content))
        while True:
            loaded.put((next(read), None, ""))
    except BaseException as error:  # the host raises it again
        loaded.put((None, error, traceback.format_exc()))
    threading.Event().wait()


def _unpicklable(error: BaseException) -> errors.DataError:
    return errors.DataError(
        f"a pipeline yields, or raises, what cannot be pickled: {error!r}"
    )


def _send_all(writing: int, loaded: queue.Queue[Any]) -> None:
    while True:
        what = loaded.get()
        try:
            if what[1] is not None:
                # Some that can be sent cannot be made again, there as little as here.
                copy.copy(what[1])
            _send(writing, what)
        except OSError:
            # The host is gone.
            os._exit(1)
        except Exception as error:  # whatever objects of a user raise
            _, failure, where = what
            _send(writing, (None, _unpicklable(failure or error), where))


def _end_with(given: int) -> None:
    while os.read(given, 1):
        pass
    os._exit(1)


def _fill_from(pipe: int, memory: memoryview) -> None:
    while memory:
        if not (num_read := os.readv(pipe, [memory])):
            # The host has ended already.
            os._exit(1)
        memory = memory[num_read:]
