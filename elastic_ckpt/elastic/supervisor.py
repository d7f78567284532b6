"""Starts the hosts of a world as processes of this machine, and supervises them.

The processes are forked from a warm server (`multiprocessing`'s forkserver) that has
imported JAX, Orbax, Grain and this package but has started neither a backend nor a
thread. Each host writes to its own log and reports over a pipe. When one fails, the
others are killed at once, because they would hang in a collective, and the first
failure is raised with the end of its log. SIGTERM is forwarded to the hosts, which save
and end; hosts that do not end within the grace period are killed. `leave` asks them for
the same without ending the run. Hosts never outlive the supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, forkserver, process
from typing import Any

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import termination
from elastic_ckpt.elastic.member import Member

# An exception may be the consequence of a death: how long to wait for further reports.
_GRACE_SECS = 0.5
# The longest time between two calls of `watch`.
_WATCH_SECS = 0.1
# The message to hosts that leave so that the run continues in another world.
_LEAVE = b"leave"
# JAX aborts a process whose coordination service, on host 0, is gone.
_CONSEQUENCES = (signal.SIGABRT,)
_SHOWN_LOG_LINES = 15


class HostChannel:
    """The channel of a host to its supervisor; an `Emit` for the supervisor's events.

    Args:
      pipe: to the supervisor.
    """

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def __call__(self, name: str, **fields: storage.Json) -> None:
        """Sends an event."""
        events.check(name, fields)
        self.send({"event": name, "fields": fields})

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, as JSON."""
        self._pipe.send_bytes(json.dumps(message).encode())

    @property
    def is_left(self) -> bool:
        """Whether this host stops because the run continues in another world."""
        return self._pipe.poll()


# The program of a host; it joins the world as the given member.
Program = Callable[[Member, HostChannel], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFailure:
    """The reason why a host stopped.

    Attributes:
      host: the host's number.
      message: the message for the user.
      is_ours: whether it is an ElasticCkptError, whose message has a remedy.
      is_of_devices: whether JAX raised it, for devices that failed or are gone.
      is_signal: whether the process died by a signal.
      is_silent: whether it ended without reporting a failure.
      is_consequence: whether it died as hosts do when host 0 is gone.
      at_secs: the time, on the machine's monotonic clock.
    """

    host: int
    message: str
    is_ours: bool = False
    is_of_devices: bool = False
    is_signal: bool = False
    is_silent: bool = False
    is_consequence: bool = False
    at_secs: float


def first_failure(failures: list[HostFailure]) -> HostFailure:
    """The failure that caused the others.

    An ElasticCkptError is never a consequence of another host's death, and death by a
    signal is never a consequence of an exception. Among equals the earliest is first.
    """
    return min(failures, key=lambda f: (not f.is_ours, not f.is_signal, f.at_secs))


class WorldLostError(errors.RunError):
    """A world ended because hosts or devices were lost; another world may go on.

    Attributes:
      hosts: the hosts that died; empty if devices failed and all processes lived.
    """

    def __init__(self, message: str, *, hosts: frozenset[int]) -> None:
        super().__init__(message)
        self.hosts = hosts


def lost_hosts(failures: list[HostFailure]) -> frozenset[int] | None:
    """The hosts whose death ended a world; None if the program itself failed.

    A host that JAX aborts has lost the coordination service, and is not a cause if
    another host died otherwise.
    """
    silent = [failure for failure in failures if failure.is_silent]
    causes = [failure for failure in silent if not failure.is_consequence] or silent[:1]
    if causes:
        return frozenset(failure.host for failure in causes)
    if failures and all(failure.is_of_devices for failure in failures):
        return frozenset()
    return None


class HostProcesses:
    """Host processes on this machine that compute together until their program ends.

    Args:
      program: runs on every host; picklable. SIGTERM is blocked until it has joined.
      num_hosts: the number of hosts.
      log_directory: the directory for `host-<n>.log`, the output of each host.
      emit: called for the events of every host, and for `host_lost` and
        `stop_requested`.
      grace_secs: the time limit for hosts to save and end after SIGTERM.
      watch: called between events, every 0.1 s at least, in the thread of `run`.

    Attributes:
      is_left: whether the hosts were asked to leave, and not to end the run.
    """

    def __init__(
        self,
        program: Program,
        *,
        num_hosts: int,
        log_directory: str | os.PathLike[str],
        emit: events.Emit,
        grace_secs: float = 60,
        watch: Callable[[HostProcesses], None] | None = None,
    ) -> None:
        self.is_left = False
        self._on_watch = watch
        self._program = program
        self._num_hosts = num_hosts
        self._grace_secs = grace_secs
        self._logs = [
            pathlib.Path(log_directory) / f"host-{host}.log"
            for host in range(num_hosts)
        ]
        self._emit = emit
        self._processes: list[process.BaseProcess] = []
        self._channels: dict[connection.Connection, int] = {}
        self._failures: list[HostFailure] = []
        self._is_running = False  # whether a host has reported anything
        # The time limit for hosts to end, or to report their failures after the first.
        self._deadline_secs: float | None = None

    def run(self) -> None:
        """Starts the hosts and returns when all are done; runs in the main thread.

        Raises:
          WorldLostError: if hosts were lost, with the first failure; after all hosts
            have ended, as always.
          RunError: with the first failure of the program.
          StoppedError: if SIGTERM arrived and hosts exceeded the grace period.
        """
        reserved, address = _reserve_port()
        try:
            with termination.Notice() as notice:
                self._start(address)
                self._watch(notice)
        finally:
            self._kill()
            reserved.close()
        if self._failures:
            failure = first_failure(self._failures)
            if failure.is_silent:
                self._emit("host_lost", host=failure.host, why=failure.message)
            lost = lost_hosts(self._failures)
            if lost is not None:
                raise WorldLostError(self._describe(failure), hosts=lost)
            raise errors.RunError(self._describe(failure))
        if self._channels:
            raise errors.StoppedError(self._describe_stop())

    def leave(self) -> None:
        """Asks the hosts to save and leave after a step that they agree on."""
        if self._is_running and self._deadline_secs is None and not self.is_left:
            self.is_left = True
            for channel in self._channels:
                # A host that has just died is reported by the other end of its pipe.
                with contextlib.suppress(OSError):
                    channel.send_bytes(_LEAVE)
            self._terminate()

    def send_signal(self, hosts: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to hosts: a fault, for tests and demonstrations."""
        for host in hosts:
            child = self._processes[host]
            if child.is_alive():
                assert child.pid is not None
                os.kill(child.pid, number)

    def _start(self, address: str) -> None:
        with termination.held():
            self._start_hosts(address)

    def _start_hosts(self, address: str) -> None:
        context = multiprocessing.get_context("forkserver")
        for host, log in enumerate(self._logs):
            storage.make_directory(log.parent)
            receiver, sender = context.Pipe()
            member = Member(address=address, num_hosts=self._num_hosts, host=host)
            arguments = (self._program, member, str(log), sender)
            child = context.Process(
                target=_host_main, args=arguments, name=f"host-{host}"
            )
            child.start()
            sender.close()
            self._processes.append(child)
            self._channels[receiver] = host

    def _watch(self, notice: termination.Notice) -> None:
        while self._channels:
            wait_secs = None
            if self._deadline_secs is not None:
                wait_secs = self._deadline_secs - time.monotonic()
                if wait_secs <= 0:
                    return
            elif self._on_watch is not None:
                self._on_watch(self)
                wait_secs = _WATCH_SECS
            channels = [*self._channels, notice.fileno()]
            for ready in connection.wait(channels, wait_secs):
                if isinstance(ready, connection.Connection):
                    self._receive(ready)
                elif notice.received():
                    self._stop()

    def _receive(self, channel: connection.Connection) -> None:
        host = self._channels[channel]
        try:
            message = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            # The host has ended, without a message or in the middle of one.
            del self._channels[channel]
            child = self._processes[host]
            child.join()
            if child.exitcode and all(f.host != host for f in self._failures):
                self._fail(_silent_death(host, child.exitcode))
            return
        if "failure" in message:
            self._fail(HostFailure(host=host, **message["failure"]))
        else:
            self._is_running = True
            self._emit(message["event"], **message["fields"])

    def _fail(self, failure: HostFailure) -> None:
        if not self._failures:
            self._deadline_secs = time.monotonic() + _GRACE_SECS
        if failure.is_signal and not failure.is_consequence:
            # Nothing else has caused it; the other hosts hang, or will.
            self._deadline_secs = time.monotonic()
        self._failures.append(failure)

    def _stop(self) -> None:
        if not self._is_running:
            # There is nothing to save yet.
            self._deadline_secs = time.monotonic()
        elif self._deadline_secs is None:
            self._emit("stop_requested", within_secs=self._grace_secs)
            self._deadline_secs = time.monotonic() + self._grace_secs
            if not self.is_left:
                self._terminate()
            self.is_left = False

    def _terminate(self) -> None:
        for child in self._processes:
            # JAX's preemption service handles the signal.
            child.terminate()

    def _kill(self) -> None:
        for child in self._processes:
            child.kill()
        for child in self._processes:
            child.join()

    def _describe_stop(self) -> str:
        if not self._is_running:
            return "ended by SIGTERM before the first step"
        hosts = ", ".join(map(str, self._channels.values()))
        return (
            f"hosts {hosts} did not save and end within {self._grace_secs:g} s of"
            " SIGTERM and were killed; raise termination_grace_period_seconds if saving"
            " takes longer and the launcher waits for it"
        )

    def _describe(self, failure: HostFailure) -> str:
        if failure.is_ours:
            return failure.message
        log = self._logs[failure.host]
        # A host that failed to start has no log.
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = text.splitlines()[-_SHOWN_LOG_LINES:]
        return "\n".join(
            [
                f"host {failure.host} failed: {failure.message}",
                f"the end of its log, {log}:",
                *(f"  | {line}" for line in lines),
            ]
        )


def warm_up(modules: Sequence[str]) -> None:
    """Starts the fork server, which imports `modules` while the caller continues.

    Args:
      modules: the modules that hosts import; importing them must not start a thread or
        a JAX backend.
    """
    forkserver.set_forkserver_preload(list(modules))
    with termination.held():
        forkserver.ensure_running()


def _silent_death(host: int, exit_code: int) -> HostFailure:
    killed = exit_code < 0
    message = (
        f"killed by {signal.Signals(-exit_code).name}"
        if killed
        else f"ended with exit code {exit_code}"
    )
    return HostFailure(
        host=host,
        message=message,
        is_signal=killed,
        is_silent=True,
        is_consequence=killed and -exit_code in _CONSEQUENCES,
        at_secs=time.monotonic(),
    )


def _reserve_port() -> tuple[socket.socket, str]:
    # The OS chooses the port and reserves it while this socket is open. gRPC servers
    # also bind with SO_REUSEPORT, and only a listening socket accepts connections.
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved, f"127.0.0.1:{reserved.getsockname()[1]}"


def _host_main(
    program: Program,
    member: Member,
    log: str,
    pipe: connection.Connection,
) -> None:
    _die_with_supervisor()
    # Ctrl-C reaches every process of the terminal; only the supervisor reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(log)

    channel = HostChannel(pipe)
    try:
        program(member, channel)
    except BaseException as error:
        # The root of the process: the error is reported here or never.
        traceback.print_exc()
        ours = isinstance(error, errors.ElasticCkptError)
        summary = traceback.format_exception_only(error)[-1].strip()
        failure = HostFailure(
            host=member.host,
            message=str(error) if ours else summary,
            is_ours=ours,
            is_of_devices=_is_of_devices(error),
            at_secs=time.monotonic(),
        )
        fields: dict[str, Any] = dataclasses.asdict(failure)
        del fields["host"]
        channel.send({"failure": fields})
        sys.stdout.flush()
        # Skips JAX's shutdown, which would wait for hosts that hang.
        os._exit(1)
    sys.stdout.flush()


def _is_of_devices(error: BaseException) -> bool:
    # JAX was imported by whatever could raise it.
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def _die_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None

    def watch() -> None:
        connection.wait([supervisor.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-supervisor", daemon=True).start()
