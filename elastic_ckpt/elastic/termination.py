"""SIGTERM or Ctrl-C: the run saves and stops after a step that all hosts agree on.

Launchers send SIGTERM and, some time later, SIGKILL. In a world of multiple processes,
JAX's preemption service handles the signal on any host and chooses the step. A single
process has a `Notice` and exits without saving when the time is up. A world's
supervisor also has a `Notice`: it forwards the signal and kills the hosts when the time
is up. Within `ending`, the first Ctrl-C acts like SIGTERM, and the second terminates
the process without saving.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker

from elastic_ckpt.core import background, events, preemption

# Set by the first Ctrl-C.
_interrupted = threading.Event()


def exit_code() -> int:
    """The exit status that shells use for the signal that asked the run to stop."""
    return 128 + (signal.SIGINT if _interrupted.is_set() else signal.SIGTERM)


def cause() -> str:
    """The signal that asked the run to stop, as named in messages."""
    return "Ctrl-C" if _interrupted.is_set() else "SIGTERM"


@contextlib.contextmanager
def ending(program: str) -> Iterator[None]:
    """Stops this program on SIGTERM while the block runs; treats Ctrl-C as SIGTERM.

    Training code inside the block opens a `Notice`, so the run saves before it stops.
    Works only in the main thread.

    Raises:
      SystemExit: on the signal, with status `exit_code()`.
    """

    def end(*_: object) -> None:
        _say(f"{program}: stopped by {cause()} before the first step")
        raise SystemExit(exit_code())

    def interrupted(*_: object) -> None:
        if _interrupted.is_set():
            _say("elastic-ckpt: interrupted again; exiting immediately")
            # Processes that this one started exit with it.
            os._exit(exit_code())
        _interrupted.set()
        _say("elastic-ckpt: saving and stopping; press Ctrl-C again to exit now")
        os.kill(os.getpid(), signal.SIGTERM)

    _interrupted.clear()
    with _handled(signal.SIGTERM, end), _handled(signal.SIGINT, interrupted):
        yield


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def call_beside(call: Callable[[], object]) -> None:
    """Calls a function in a thread after SIGTERM, in addition to the current handler.

    May call the function more than once per signal. Misses signals delivered to threads
    that Python did not start; the main thread receives signals as long as it does not
    block them.
    """
    # `faulthandler` writes a stack into a pipe, then runs the previous handler.
    reader, writer = os.pipe()
    faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=True)

    def wait() -> None:
        # The supervisor closes its end when it is about to kill this process.
        with contextlib.suppress(OSError):
            while os.read(reader, 65536):
                call()

    background.in_thread(wait, name="note-sigterm")


class Notice:
    """Receives SIGTERM while open, so that the signal does not kill the process.

    The descriptor becomes readable immediately after a signal, even while the main
    thread is compiling or waiting. A `Notice` opened in another thread receives no
    signals. If a SIGTERM arrives but `received` has not returned it by the time the
    `Notice` closes, the previous handler gets it.

    Attributes:
      has_received: whether `received` has returned True.
    """

    has_received = _has_come = False

    def __enter__(self) -> Notice:
        with contextlib.ExitStack() as stack:
            self._reader, self._writer = map(stack.enter_context, socket.socketpair())
            self._writer.setblocking(False)
            if threading.current_thread() is threading.main_thread():
                # Python writes the number of each signal that has a handler in Python.
                writer = self._writer.fileno()
                before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
                stack.callback(signal.set_wakeup_fd, before)
                stack.enter_context(_handled(signal.SIGTERM, self._note))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._has_come and not self.has_received:
            signal.raise_signal(signal.SIGTERM)

    def fileno(self) -> int:
        """The descriptor, which becomes readable after a signal."""
        return self._reader.fileno()

    def received(self) -> bool:
        """Waits for a signal or `stop`; returns whether it was SIGTERM."""
        is_sigterm = signal.SIGTERM in self._reader.recv(4096)
        self.has_received |= is_sigterm
        return is_sigterm

    def is_coming(self) -> bool:
        """Whether `received` would return immediately."""
        return bool(connection.wait([self._reader], 0))

    def _note(self, *_: object) -> None:
        self._has_come = True

    def stop(self) -> None:
        """Makes `received` return in another thread."""
        self._writer.send(bytes(1))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Blocks SIGTERM in processes started in the block until they call `agreed`."""
    # Starting the tracker later would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def agreed() -> Iterator[Callable[[int], bool]]:
    """Yields a function that returns whether the hosts leave after a number of steps.

    For a world of multiple processes. Every host calls the function after each step and
    gets the same result. A signal before the first call ends the run after that call.
    """
    from jax.experimental import multihost_utils

    # The checkpointer asks the same service.
    with preemption.counting():
        # A signal that arrived while it was blocked is delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield functools.partial(
            preemption.reached, ask=multihost_utils.reached_preemption_sync_point
        )


@contextlib.contextmanager
def in_this_process(
    *, grace_secs: float, ended: Callable[[], None], emit: events.Emit
) -> Iterator[Callable[[int], bool]]:
    """`agreed` for the only process in its world, with a time limit.

    The process exits without saving if the block takes longer than `grace_secs` after
    the signal. On a signal before the first call, it exits immediately: there is
    nothing to save. Calls `emit` on the signal and `ended` before the exit, both in
    another thread.
    """
    has_trained, is_told, is_over = (threading.Event() for _ in range(3))

    def watch() -> None:
        while not notice.received():
            if is_over.is_set():
                return
        if has_trained.is_set():
            # The run ends with its own event, which comes after this one.
            try:
                emit("stop_requested", within_secs=grace_secs)
            finally:
                is_told.set()
            if is_over.wait(grace_secs):
                return
        else:
            _say(f"elastic-ckpt train: stopped by {cause()} before the first step")
        ended()
        os._exit(exit_code())

    def is_ending(_: int) -> bool:
        has_trained.set()
        return is_told.is_set()

    with Notice() as notice:
        watching = background.in_thread(watch, name="await-sigterm")
        try:
            yield is_ending
        finally:
            is_over.set()
            notice.stop()
            background.wait([watching])


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())
