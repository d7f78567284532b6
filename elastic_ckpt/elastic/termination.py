"""SIGTERM: a run that is asked to end saves first, after a step agreed on by all hosts.

Launchers send SIGTERM and some time later SIGKILL. In a world of several processes
JAX's preemption service catches the signal on any host and agrees on the step. A
process of its own has a `Notice`, and gives up when the time is over. The supervisor of
a world has one too: it passes the signal on, and kills the hosts when the time is over.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

# As a shell reports a process that SIGTERM ended.
EXIT_CODE = 128 + signal.SIGTERM


class Notice:
    """Receives SIGTERM while it is open, instead of ending the process.

    Unlike a handler it does so at once, even while the main thread compiles or waits.
    Its descriptor is readable once a signal has arrived. Open it in the main thread.
    """

    def __enter__(self) -> Notice:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handler = signal.signal(signal.SIGTERM, _do_nothing)
        self._wakeup = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGTERM, self._handler)
        self._writer.close()
        self._reader.close()

    def fileno(self) -> int:
        """Of the descriptor that becomes readable."""
        return self._reader.fileno()

    def received(self) -> bool:
        """Whether SIGTERM is among the signals that have arrived; waits for any."""
        return signal.SIGTERM in self._reader.recv(4096)

    def wait(self) -> bool:
        """Waits for SIGTERM; False if another thread calls `stop` first."""
        while signals := self._reader.recv(4096):
            if signal.SIGTERM in signals:
                return True
        return False

    def stop(self) -> None:
        """Ends `wait` in another thread."""
        if signal.set_wakeup_fd(self._wakeup) == self._writer.fileno():
            self._writer.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Has processes that are started in the block hold SIGTERM until `release`."""
    # Starting the tracker unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Takes a SIGTERM that was held, and those to come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def agreed(
    *,
    start_step: int,
    grace_secs: float,
    requested: Callable[[], None],
    expired: Callable[[], None],
) -> Iterator[Callable[[int], bool]]:
    """Yields a function: is the run to end now that so many steps are done?

    Every host calls it after each step, and gets the same answer.

    Args:
      start_step: steps that are done already.
      grace_secs: how long after the signal the block may last in a process of its own;
        elsewhere the supervisor or the launcher sets the limit.
      requested: called, in another thread, when the signal arrives.
      expired: called, in another thread, when the time is over.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.distributed.is_initialized():
        # The service counts from 0 and ends all hosts one call after the farthest of
        # them, so steps are counted from the first of this world: a signal before it
        # ends the run after it.
        def is_reached(step: int) -> bool:
            return multihost_utils.reached_preemption_sync_point(step - start_step)

        yield is_reached
        return
    asked, ended = threading.Event(), threading.Event()

    def watch(notice: Notice) -> None:
        if notice.wait():
            asked.set()
            requested()
            if not ended.wait(grace_secs):
                expired()

    with Notice() as notice:
        watching = threading.Thread(
            target=watch, args=(notice,), name="termination", daemon=True
        )
        watching.start()
        try:
            yield lambda _: asked.is_set()
        finally:
            ended.set()
            notice.stop()
            watching.join()


def _do_nothing(number: int, frame: types.FrameType | None) -> None:
    # With a handler in Python the signal is written to the descriptor.
    del number, frame
