"""The process of a host, and its channel to the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from elastic_ckpt.core import events, storage
from elastic_ckpt.elastic import failures, host_load, termination, watch
from elastic_ckpt.elastic.member import Member

# At least between two reports of the same phase.
_PHASE_SECS = 0.2
# How soon JAX aborts a process that has lost the coordination service.
_ABORT_SECS = 2.0
# How long other hosts have to report their failures, at most.
_REPORT_SECS = 10.0
# Between two looks for connections of a host that is cut off.
_CUT_SECS = 0.02
# The messages of the supervisor: a world begins, and its hosts leave for another one;
# with the last one, the memory of some of them is lost when they have left.
BEGIN = b"begin"
LEAVE = b"leave"
LOSE_MEMORY = b"lose memory"


class HostChannel:
    """The channel of a host to its supervisor; an `Emit` for the supervisor's events.

    Args:
      pipe: to the supervisor.
    """

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._load = host_load.HostLoad()
        self._phase = watch.TRAIN
        self._phase_secs = 0.0
        # How many phases have begun, reported or not.
        self._num_begun = 0
        self._has_stepped = False
        # The message with which this host leaves.
        self._left = b""

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Sends an event."""
        events.check(name, fields)
        self.send({"event": name, "fields": fields})

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, as JSON; from any thread."""
        with self._lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def begin(self, phase: str | None = None) -> None:
        """Reports that the program begins a phase; None begins the same once more."""
        phase = phase or self._phase
        self._num_begun += 1
        now_secs = time.monotonic()
        if phase != self._phase or now_secs - self._phase_secs > _PHASE_SECS:
            self._phase, self._phase_secs = phase, now_secs
            self.send({"phase": phase, "begun": self._num_begun})

    def step(self) -> None:
        """Reports that a step is done, and the phase begins once more."""
        if not self._has_stepped:
            self._has_stepped = True
            self.send({"stepped": True})
        self.begin()

    def wait(self) -> None:
        """Returns when the world begins, which this host has joined.

        From here on SIGTERM is reported to the supervisor.
        """
        self._report_sigterm()
        self._load.listen()
        self.send({"ready": True})
        message = self._pipe.recv_bytes()
        assert message == BEGIN, message

    def send_heartbeats(self) -> None:
        """Sends one each second, with what this host alone spends time on."""
        # The supervisor's end is closed when it is about to kill this process.
        with contextlib.suppress(OSError):
            while True:
                begun = self._num_begun
                self.send({"heartbeat": self._load.take(), "begun": begun})
                self._load.sleep()

    def _report_sigterm(self) -> None:
        # JAX handles the signal outside of Python, and does not name the host that got
        # it.
        termination.call_beside(signal.SIGTERM, lambda: self.send({"sigterm": True}))

    @property
    def is_left(self) -> bool:
        """Whether this host stops because the run continues in another world."""
        with self._lock:
            if not self._left and self._pipe.poll():
                try:
                    self._left = self._pipe.recv_bytes()
                except (EOFError, OSError):
                    # The supervisor is about to kill this process.
                    self._left = LEAVE
            return bool(self._left)

    @property
    def loses_memory(self) -> bool:
        """Whether hosts leave whose memory is lost then."""
        return self.is_left and self._left == LOSE_MEMORY


# The program of a host; it joins the world as the given member.
Program = Callable[[Member, HostChannel], None]
# What a process does, with the pipe to its supervisor; picklable.
Task = Callable[[connection.Connection], None]


def run(
    program: Program,
    member: Member,
    log: str,
    pipe: connection.Connection,
) -> None:
    """Runs `program` in this process, whose task it is (see `stand_by`).

    Args:
      program: of the host.
      member: the host.
      log: the file for its output.
      pipe: to the supervisor.
    """
    redirect_output(log)
    channel = HostChannel(pipe)
    # The supervisor asks for the stacks of hosts that hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(
        target=channel.send_heartbeats, name="heartbeats", daemon=True
    ).start()
    try:
        # A fault, see `faults`.
        with termination.calling(signal.SIGUSR2, _begin_to_cut_off):
            program(member, channel)
    except BaseException as error:
        # The root of the process: the error is reported here or never.
        traceback.print_exc()
        failure = failures.of_exception(member.host, error)
        if failure.is_of_devices:
            # If it is this host that has lost all others, JAX aborts it meanwhile.
            time.sleep(_ABORT_SECS)
        fields: dict[str, Any] = dataclasses.asdict(failure)
        del fields["host"]
        channel.send({"failure": fields})
        sys.stdout.flush()
        if failure.is_of_devices:
            # The supervisor ends it when all have reported: with host 0 the others
            # lose the coordination service, and JAX would abort them for that.
            time.sleep(_REPORT_SECS)
        # Skips JAX's shutdown, which would wait for hosts that hang.
        os._exit(1)
    sys.stdout.flush()
    if channel.is_left:
        # Does not wait for threads that make backups: the next world makes them.
        os._exit(0)


def stand_by(pipe: connection.Connection, example: Task | None) -> None:
    """Waits for a task, and does it: what a new process of a supervisor runs.

    It ends with the supervisor.

    Args:
      pipe: to the supervisor, which sends the task.
      example: a task that imports what the one to come imports; None if this waits for
        nothing.
    """
    _detach()
    if example is not None:
        # The pages of its objects become its own now, and not when a host needs them.
        gc.collect()
    # What was imported is never garbage, and a collection would copy all of its pages.
    gc.freeze()
    try:
        task: Task = pipe.recv()
    except EOFError:
        return
    task(pipe)


def detach(log: str) -> None:
    """Detaches this process from the terminal; it ends with the supervisor.

    Args:
      log: the file for its output.
    """
    _detach()
    redirect_output(log)


def redirect_output(log: str) -> None:
    """Appends the output of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def _begin_to_cut_off() -> None:
    threading.Thread(target=_cut_off, name="cut-off", daemon=True).start()


def _cut_off() -> None:
    # Ends the connections of this process to others, and each one that is made later.
    while True:
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                _shut_down(os.dup(int(descriptor)))
        time.sleep(_CUT_SECS)


def _shut_down(descriptor: int) -> None:
    # Closes the descriptor as well, whatever it is.
    try:
        connected = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return
    with connected:
        # A socket that accepts connections may do so: they are ended, too.
        is_listening = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if connected.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
            connected.shutdown(socket.SHUT_RDWR)


def _detach() -> None:
    _die_with_supervisor()
    # Ctrl-C reaches every process of the terminal; only the supervisor reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _die_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None

    def watch() -> None:
        connection.wait([supervisor.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-supervisor", daemon=True).start()
