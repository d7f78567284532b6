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
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, forkserver, process

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import host_failure, host_process, termination
from elastic_ckpt.elastic import watch as hang_watch
from elastic_ckpt.elastic.host_failure import HostFailure
from elastic_ckpt.elastic.member import Member

# An exception may be the consequence of a death: how long to wait for further reports.
_GRACE_SECS = 0.5
# The longest time between two calls of `watch`.
_WATCH_SECS = 0.1
# How long hosts that hang have to write their stacks.
_STACKS_SECS = 0.5
# The message to hosts that leave so that the run continues in another world.
_LEAVE = b"leave"
_SHOWN_LOG_LINES = 15


class HostProcesses:
    """Host processes on this machine that compute together until their program ends.

    Args:
      program: runs on every host; picklable. SIGTERM is blocked until it has joined.
      num_hosts: the number of hosts.
      log_directory: the directory for `host-<n>.log`, the output of each host.
      emit: called for the events of every host, and for `host_lost` and
        `stop_requested`.
      limits: how long hosts may take to save and end after SIGTERM, and may hang; by
        default 60 s, and for any time.
      watch: called between events, every 0.1 s at least, in the thread of `run`.

    Attributes:
      is_left: whether the hosts were asked to leave, and not to end the run.
    """

    def __init__(
        self,
        program: host_process.Program,
        *,
        num_hosts: int,
        log_directory: str | os.PathLike[str],
        emit: events.Emit,
        limits: hang_watch.Limits | None = None,
        watch: Callable[[HostProcesses], None] | None = None,
    ) -> None:
        limits = limits or hang_watch.Limits()
        self._hangs = hang_watch.Watch(limits, num_hosts, now_secs=time.monotonic())
        self.is_left = False
        self._on_watch = watch
        self._program = program
        self._num_hosts = num_hosts
        self._grace_secs = limits.grace_secs
        self._logs = [
            pathlib.Path(log_directory) / f"host-{host}.log"
            for host in range(num_hosts)
        ]
        self._emit = emit
        self._processes: list[process.BaseProcess] = []
        self._channels: dict[connection.Connection, int] = {}
        self._failures: list[HostFailure] = []
        self._is_running = False  # whether a host has reported more than joining
        # The time limit for hosts to end, or to report their failures after the first.
        self._deadline_secs: float | None = None

    def run(self) -> None:
        """Starts the hosts and returns when all are done.

        In the main thread it forwards SIGTERM.

        Raises:
          WorldLostError: if hosts were lost, with the first failure; after all hosts
            have ended, as always.
          RunError: with the first failure of the program.
          StoppedError: if SIGTERM arrived and hosts exceeded the grace period.
        """
        reserved, address = _reserve_port()
        try:
            with _notice() as notice:
                self._start(address)
                self._watch(notice)
        finally:
            self._kill()
            reserved.close()
        if self._failures:
            failure = host_failure.first_failure(self._failures)
            if failure.is_silent:
                self._emit("host_lost", host=failure.host, why=failure.message)
            lost = host_failure.lost_hosts(self._failures)
            if lost is not None:
                raise host_failure.WorldLostError(
                    self._describe(failure),
                    hosts=lost,
                    at_secs=min(each.at_secs for each in self._failures),
                )
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

    def end(self) -> None:
        """Ends the hosts at once; `watch` calls it."""
        self._deadline_secs = time.monotonic()

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
                target=host_process.run, args=arguments, name=f"host-{host}"
            )
            child.start()
            sender.close()
            self._processes.append(child)
            self._channels[receiver] = host

    def _watch(self, notice: termination.Notice | None) -> None:
        while self._channels:
            wait_secs = None
            if self._deadline_secs is not None:
                wait_secs = self._deadline_secs - time.monotonic()
                if wait_secs <= 0:
                    return
            else:
                if self._on_watch is not None:
                    self._on_watch(self)
                wait_secs = _WATCH_SECS
            channels: list[connection.Connection | int] = [*self._channels]
            if notice is not None:
                channels.append(notice.fileno())
            for ready in connection.wait(channels, wait_secs):
                if isinstance(ready, connection.Connection):
                    self._receive(ready)
                elif notice is not None and notice.received():
                    self._stop()
            # Only now: messages may have waited while this process was busy.
            if self._deadline_secs is None:
                self._find_hang()

    def _receive(self, channel: connection.Connection) -> None:
        host = self._channels[channel]
        try:
            message = json.loads(channel.recv_bytes())
        except (EOFError, OSError):
            # The host has ended, without a message or in the middle of one.
            del self._channels[channel]
            self._hangs.end(host)
            child = self._processes[host]
            child.join()
            if child.exitcode and all(f.host != host for f in self._failures):
                self._fail(host_failure.silent_death(host, child.exitcode))
            return
        now_secs = time.monotonic()
        if "heartbeat" in message:
            self._hangs.heartbeat(host, now_secs=now_secs)
        elif "phase" in message:
            self._hangs.begin(host, message["phase"], now_secs=now_secs)
        elif "failure" in message:
            self._fail(HostFailure(host=host, **message["failure"]))
        else:
            # A world that has only joined has nothing to save.
            self._is_running |= message["event"] != "world_joined"
            self._emit(message["event"], **message["fields"])

    def _fail(self, failure: HostFailure) -> None:
        if not self._failures:
            self._deadline_secs = time.monotonic() + _GRACE_SECS
        if failure.is_signal and not failure.is_consequence:
            # Nothing else has caused it; the other hosts hang, or will.
            self._deadline_secs = time.monotonic()
        self._failures.append(failure)

    def _find_hang(self) -> None:
        now_secs = time.monotonic()
        hang = self._hangs.hang(now_secs=now_secs)
        if hang is None:
            return
        alive = range(self._num_hosts)
        self.send_signal(alive, signal.SIGUSR1)
        self.send_signal(alive, signal.SIGCONT)
        time.sleep(_STACKS_SECS)
        message = f"{hang.why}; the stacks of all hosts are in their logs"
        for host in hang.hosts or [0]:
            self._fail(
                HostFailure(
                    host=host,
                    message=message,
                    is_signal=bool(hang.hosts),
                    is_silent=bool(hang.hosts),
                    is_of_devices=not hang.hosts,
                    at_secs=now_secs,
                )
            )

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


def _notice() -> contextlib.AbstractContextManager[termination.Notice | None]:
    is_main = threading.current_thread() is threading.main_thread()
    return termination.Notice() if is_main else contextlib.nullcontext()


def _reserve_port() -> tuple[socket.socket, str]:
    # The OS chooses the port and reserves it while this socket is open. gRPC servers
    # also bind with SO_REUSEPORT, and only a listening socket accepts connections.
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved, f"127.0.0.1:{reserved.getsockname()[1]}"
